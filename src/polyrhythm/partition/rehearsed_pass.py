"""The messages of a hybrid pass without its numbers, for networks that nobody computes.

Every message is as large as that of `HybridPass`, and comes at the same place: examples that set out one round early,
outputs of hidden layers, logits, and the gradients of all three on their way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.message import Kind, Message
from polyrhythm.partition import scheme as schemes
from polyrhythm.partition.scheme import Scheme
from polyrhythm.partition.sharded_layers import neurons

_EXAMPLES, _LAYERS = 1, 2


@dataclass(frozen=True)
class HeadSizes:
    """What the messages depend on.

    Attributes:
        features: of an example: A.
        widths: neurons of each layer.
        trains_trunk: whether somebody wants the gradients of examples.
        number: a tensor of the dtype and device of what travels.
        stands_for: how many numbers each number of a message stands for.
    """

    features: int
    widths: tuple[int, ...]
    trains_trunk: bool
    number: Tensor
    stands_for: float = 1.0


class RehearsedPass:
    """One worker's passes. All workers must call it equally often.

    Args:
        sizes: of the head.
        group: the workers.
        scheme: which examples the head sees together.
    """

    def __init__(self, sizes: HeadSizes, group: Communicator, scheme: Scheme) -> None:
        self._sizes = sizes
        self._scheme = scheme
        self._rank, self._size = group.rank, group.size
        self._group = group.subgroup("activations", range(group.size)) if group.size > 1 else group
        self._widths = [
            [place.stop - place.start for place in neurons(each, group.size)] for each in sizes.widths
        ]

    def run(self, batch: int) -> None:
        """Passes a batch of so many examples of this worker through the head and back."""
        setting_out = self._send(batch, 0)
        for number in range(schemes.rounds(self._scheme, self._size)):
            under_way, setting_out = setting_out, self._send(batch, number + 1)
            self._round([self._rows(batch, number, source) for source in range(self._size)])
            for handle in under_way:
                handle.wait()

    def _round(self, counts: Sequence[int]) -> None:
        rank, rows = self._rank, sum(counts)
        *hidden, last = self._widths
        for widths in hidden:
            self._swap([rows * widths[rank]] * self._size, [rows * width for width in widths])
        logits = [count * last[rank] for count in counts], [counts[rank] * width for width in last]
        self._swap(*logits)
        self._swap(*reversed(logits))
        for widths in reversed(hidden):
            self._swap([rows * width for width in widths], [rows * widths[rank]] * self._size)
        if self._sizes.trains_trunk:
            features = self._sizes.features
            self._swap([count * features for count in counts], [counts[rank] * features] * self._size)

    def _send(self, batch: int, number: int) -> list[Handle]:
        last = number >= schemes.rounds(self._scheme, self._size)
        if last or not schemes.sends(self._scheme, self._rank, number):
            return []
        place = schemes.place(self._scheme, batch, self._size, number)
        rows = place.stop - place.start
        examples = self._numbers(rows * self._sizes.features)
        # How many rows there are cannot be told from numbers that stand for several.
        message = Message(Kind.VECTOR, examples, step=rows, tag=_EXAMPLES)
        return [self._group.start_send(to, message) for to in self._others()]

    def _rows(self, batch: int, number: int, source: int) -> int:
        if not schemes.sends(self._scheme, source, number):
            return 0
        if source != self._rank:
            _, message = self._group.receive(source, _EXAMPLES)
            return message.step
        place = schemes.place(self._scheme, batch, self._size, number)
        rows: int = place.stop - place.start
        return rows

    def _swap(self, sent: Sequence[int], taken: Sequence[int]) -> None:
        """Sends so many numbers to each worker, and waits for so many of each."""
        handles = [
            self._group.start_send(to, Message(Kind.VECTOR, self._numbers(sent[to]), tag=_LAYERS))
            for to in self._others()
            if sent[to]
        ]
        for source, count in enumerate(taken):
            if count and source != self._rank:
                self._group.receive(source, _LAYERS)
        for handle in handles:
            handle.wait()

    def _numbers(self, count: int) -> Tensor:
        return self._sizes.number.new_zeros(round(count / self._sizes.stands_for))

    def _others(self) -> list[int]:
        return [(self._rank + offset) % self._size for offset in range(1, self._size)]

"""Transfer of parameters between worker 0, which holds a whole network for a while, and the workers that hold parts.

    worker 0     ── pieces of w ──▶ worker w      at the start
    worker 0     ◀── pieces of w ── worker w      before a test, a checkpoint, and at the end

A sender waits after each window for the receiver, which so never has more than one window of its own parts twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import RunError

WINDOW_BYTES = 4 << 20
"""Parameters that are in progress between two workers at once."""


class ParameterTransfer:
    """One worker's transfers. All workers must make the same ones in the same order.

    Args:
        group: communicator of the workers, used for nothing else.

    Attributes:
        number: number of the present transfer, which all workers count.
    """

    def __init__(self, group: Communicator) -> None:
        self._group = group
        self.number = 0

    def hand_out(self, pieces: Sequence[Sequence[Tensor]]) -> None:
        """Send each worker but this one, worker 0, its pieces; `pieces[w]` are those of worker w."""
        handles: list[Handle] = []
        for to in range(1, self._group.size):
            handles += self.send(to, pieces[to])
        for handle in handles:
            handle.wait()

    def send(self, to: int, pieces: Sequence[Tensor]) -> list[Handle]:
        """Start to send parameters to another worker, at most as many pieces as it can store in addition to its own."""
        handles = []
        for part, tag, full in _in_windows(pieces):
            handles.append(self._group.start_send(to, Message(Kind.VECTOR, part, step=self.number, tag=tag)))
            if full:
                self._group.receive(to)
        return handles

    def receive(self, source: int, pieces: Sequence[Tensor]) -> None:
        """Overwrite pieces of parameters with those of another worker.

        Raises:
            RunError: they are of other sizes.
        """
        for part, tag, full in _in_windows(pieces):
            _, message = self._group.receive(source, tag)  # a shorter one may overtake those before it
            if message.tensor is None or message.tensor.shape != part.shape or message.step != self.number:
                raise RunError(
                    f"worker {source} sent other parameters than were expected; all workers must train the same network"
                )
            part.copy_(message.tensor)
            del message  # its memory is the next one's
            if full:
                self._group.send(source, Message(Kind.VECTOR, step=self.number))


def _in_windows(pieces: Sequence[Tensor]) -> Iterator[tuple[Tensor, int, bool]]:
    """Yield pieces in parts, with the tag of each, and whether the sender must wait for the receiver after it."""
    parts = [part for piece in pieces for part in piece.split(max(1, WINDOW_BYTES // piece.element_size()))]
    under_way = 0
    for number, part in enumerate(parts):
        under_way += part.nbytes
        full = under_way >= WINDOW_BYTES and number + 1 < len(parts)
        under_way = 0 if full else under_way
        yield part, number, full

"""The weighted mean of a group's gradients, exchanged bucket by bucket, in full or half width.

    g   = sum_i b_i g_i / sum_i b_i      full: gradients travel in their own dtype

    h_i = cast((b_i / N) * g_i)          float16 or bfloat16; divided before the cast, so that a sum does not overflow
    g   = (sum_i h_i) * N / sum_i b_i    added up as it travels, then cast back

b_i = the weight of member i's gradient g_i, N = the number of members.

A number that the narrow type can represent is exact. Others are off by at most 2^-11 (float16) or 2^-8
(bfloat16) of themselves at each cast, and each addition rounds again. The weights b_i and the requests to
stop must be exact, which such numbers cannot be: they travel separately, as integers, in one additional small
message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
from torch import Tensor

from polyrhythm.communication.all_reduce import AllReduce
from polyrhythm.communication.collective import Collective
from polyrhythm.communication.collectives.library import Library
from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.exchanger import Sums
from polyrhythm.errors import RequestError
from polyrhythm.strategies.state import Stateful
from polyrhythm.strategies.worker_part import Step
from polyrhythm.training.flat_parameters import Bucket, FlatParameters


class GradientMean(Stateful, Sums):
    """Leaves `sum_i b_i g_i / sum_i b_i` in every member's flat gradients.

    The weights and the stop request are sent in the tail of the gradients with bucket 0, so they need no separate
    message and all members receive them at the same step.

    Args:
        group: communicator of the members.
        flat: flat vector with the gradients.
        collective: collective that sums them.

    Attributes:
        word: a small number sent instead of the stop request; None: the stop request.
        words: the sum of all members' numbers.
        remembers: whether this member keeps state between steps that others do not have.
        learning_rate: learning rate of the update with the mean, where it is needed.
    """

    remembers: ClassVar[bool] = False

    def __init__(
        self, group: Communicator, flat: FlatParameters, collective: Collective | None = None
    ) -> None:
        self._group = group
        self._flat = flat
        collective = collective or Library()
        self._sum = AllReduce(collective, group, "gradients")
        self._by_library = not collective.in_messages
        # Sums by the communicator itself need neither a tag nor a message space, which `AllReduce` provides.
        self._add_up = group.all_reduce if self._by_library else self._sum.run
        self._buckets = self._cut()
        self._parts: list[Tensor] = []
        self._weight = 0.0
        self.word: float | None = None
        self.words = 0.0
        self.learning_rate = 0.0
        self._step = Step(0)
        self._under_way: list[Handle] = []

    def over(self, group: Communicator) -> GradientMean:
        """Make the mean of others' gradients, of the same kind; what is known of the links goes with it."""
        return GradientMean(group, self._flat, self._sum.passed_on())

    def prepare(self) -> None:
        """Let the collective look at the links, if it wants to; all members must call it before the first step.

        Gradients, which are zero, move to where they are added up soonest.
        """
        if self._group.size == 1:
            return
        self._sum.prepare()
        if self._by_library:
            memory = self._group.vector_to_sum("gradients", self._flat.gradients_and_tail)
            if memory is not None:
                self._flat.renew_gradients(memory)
                self._buckets = self._cut()
            elif len(self._buckets) > 1 and not self._flat.gradients.is_cuda:
                self._parts = [bucket[: self._flat.size - place.start] for bucket, place in self._places()]

    @property
    def in_parts(self) -> bool:
        """Whether buckets complete one after the other, with idle processor time between them.

        True for a library's sums over a network. Sums in shared memory are computed by the waiting process itself;
        concurrent messages of point-to-point collectives share the links, so all buckets complete late. Known after
        `prepare`.
        """
        return bool(self._parts)

    def _places(self) -> Iterator[tuple[Tensor, Bucket]]:
        return zip(self._buckets, self._flat.buckets, strict=True)

    def _cut(self) -> list[Tensor]:
        whole = self._flat.gradients_and_tail
        return [whole[place.start : place.stop] for place in self._flat.buckets]

    def begin(self, step: Step) -> None:
        """Forget the last step."""
        self._step = step
        self._under_way = []

    def start(self, bucket: int) -> None:
        """Start to sum a bucket with final gradients; buckets must be passed in order."""
        if self._group.size == 1:
            return
        self._under_way.append(self._sum.start(self._weighted(bucket)))

    def _weighted(self, bucket: int) -> Tensor:
        gradients = self._buckets[bucket]
        if self._step.weight != 1.0:
            gradients.mul_(self._step.weight)
        if bucket == 0:
            self._flat.set_tail(self._step.weight, self._own_word)
        return gradients

    @property
    def _own_word(self) -> float:
        return float(self._step.stop) if self.word is None else self.word

    @property
    def pending(self) -> list[Handle]:
        return self._under_way

    def finish(self, step: Step) -> tuple[float, bool]:
        """Start the buckets that have not been started, and wait for all.

        Args:
            step: step as in `begin`; its weight may be less if no bucket has been started.

        Returns:
            The total weight of the mean, and whether any member requests a stop. With weight 0 there is no mean, and
            the gradients are zero.
        """
        self._step = step
        if self._group.size == 1:
            return self._step.weight, self._step.stop
        if len(self._buckets) == 1 and not self._under_way:  # nothing to overlap with: no handle, no thread
            self._add_up(self._weighted(0))
        else:
            self._finish_buckets()
        weight, self.words = self._flat.tail()
        if weight > 0:
            self._flat.divide_by_tail()
        return weight, self.words > 0

    def finish_first(self, step: Step) -> tuple[float, bool]:
        """Start the buckets that have not been started, and wait for the first; for means in parts.

        Args:
            step: step as in `finish`.

        Returns:
            The same as `finish`; then each bucket must be taken.
        """
        self._step = step
        self._start_rest()
        self._under_way[0].wait()
        self._weight, stop = self._flat.tail()
        return self._weight, stop > 0

    def take(self, bucket: int) -> Tensor:
        """Wait for a bucket of a mean in parts; return its mean, or zeros if the weight is 0."""
        self._under_way[bucket].wait()
        part = self._parts[bucket]
        if self._weight > 0:
            self._flat.divide_by_tail(part)
        return part

    def _start_rest(self) -> None:
        for bucket in range(len(self._under_way), len(self._buckets)):
            self.start(bucket)

    def _finish_buckets(self) -> None:
        self._start_rest()
        for handle in self._under_way:
            handle.wait()


Transfer = Literal["full", "float16", "bfloat16"]
"""As what gradients travel; `full`: as what they are."""

_PARTS_OF_ONE = 1 << 32
"""Weights are integer multiples of one over this number."""


def gradient_mean(
    group: Communicator, flat: FlatParameters, collective: Collective, transfer: Transfer
) -> GradientMean:
    """Make the mean of gradients that travel as asked."""
    if transfer == "full":
        return GradientMean(group, flat, collective)
    return NarrowGradientMean(group, flat, collective, getattr(torch, transfer))


class NarrowGradientMean(GradientMean):
    """`GradientMean` that sends copies of the gradients in a narrower type.

    Args:
        group: communicator of the members.
        flat: flat vector with the gradients.
        collective: collective that sums them.
        dtype: type in which they are sent.
    """

    def __init__(
        self, group: Communicator, flat: FlatParameters, collective: Collective, dtype: torch.dtype
    ) -> None:
        super().__init__(group, flat, collective)
        self._by_library = False  # it is copies that travel, so the gradients stay
        self._narrow = torch.zeros(flat.size, dtype=dtype, device=flat.vector.device)
        self._weights = torch.zeros(2, dtype=torch.int64, device=flat.vector.device)
        self._weights_under_way: Handle | None = None

    def over(self, group: Communicator) -> NarrowGradientMean:
        return NarrowGradientMean(group, self._flat, self._sum.passed_on(), self._narrow.dtype)

    def start(self, bucket: int) -> None:
        if self._group.size == 1:
            return
        if bucket == 0:
            stated = [round(self._step.weight * _PARTS_OF_ONE), round(self._own_word)]
            self._weights.copy_(self._weights.new_tensor(stated))
            self._weights_under_way = self._sum.start(self._weights)
        place = self._flat.buckets[bucket]
        stop = min(place.stop, self._flat.size)
        gradients, narrow = self._flat.gradients[place.start : stop], self._narrow[place.start : stop]
        gradients.mul_(self._step.weight / self._group.size)
        narrow.copy_(gradients)
        self._under_way.append(self._sum.start(narrow))

    @property
    def pending(self) -> list[Handle]:
        weights = self._weights_under_way
        return self._under_way if weights is None else [*self._under_way, weights]

    def finish(self, step: Step) -> tuple[float, bool]:
        """Start the buckets that have not been started, and wait for all; see `GradientMean.finish`.

        Raises:
            RequestError: a gradient is out of the range of float16.
        """
        self._step = step
        if self._group.size == 1:
            return step.weight, step.stop
        self._start_rest()
        for handle in self._under_way:
            handle.wait()
        assert self._weights_under_way is not None, "they set out with bucket 0"
        self._weights_under_way.wait()
        parts, self.words = self._weights.tolist()
        self._flat.gradients.copy_(self._narrow)
        if self._narrow.dtype == torch.float16 and not bool(self._narrow.isfinite().all()):
            raise RequestError(
                f"at step {step.number} a gradient is beyond the range of float16 (65504): use "
                "transfer=bfloat16, with the range of float32, or transfer=full"
            )
        share = parts / _PARTS_OF_ONE / self._group.size
        if share not in (0, 1):
            self._flat.gradients.div_(share)
        return parts / _PARTS_OF_ONE, self.words > 0

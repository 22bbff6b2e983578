"""The weighted mean of a group's gradients, exchanged bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from torch import Tensor

from polyrhythm.communication.all_reduce import AllReduce
from polyrhythm.communication.collective import Collective
from polyrhythm.communication.collectives.library import Library
from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.step import Step
from polyrhythm.training.flat_parameters import Bucket, FlatParameters


class GradientMean:
    """Leaves `sum_i b_i g_i / sum_i b_i` in every member's flat gradients.

    The tail of the gradients carries the weights and the request to stop with bucket 0, so the mean costs no message
    of its own and everyone learns of it at the same step.

    Args:
        group: who takes part.
        flat: whose gradients.
        collective: how they are added up.
    """

    def __init__(
        self, group: Communicator, flat: FlatParameters, collective: Collective | None = None
    ) -> None:
        self._group = group
        self._flat = flat
        self._sum = AllReduce(collective or Library(), group, "gradients")
        self._by_library = not (collective or Library()).in_messages
        self._buckets = self._cut()
        self._parts: list[Tensor] = []
        self._weight = 0.0
        self._step = Step(0)
        self._under_way: list[Handle] = []

    def over(self, group: Communicator) -> GradientMean:
        """Makes the mean of others' gradients, of the same kind; what is known of the links goes with it."""
        return GradientMean(group, self._flat, self._sum.passed_on())

    def prepare(self) -> None:
        """Lets the collective look at the links, if it wants to; all members must call it before the first step.

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
    def comes_in_parts(self) -> bool:
        """Whether buckets come one after the other, with time between them in which a processor has nothing to do.

        So it is where a library's sums travel. Those of a shared memory are themselves work, done by who waits;
        messages of collectives written over them share the links, so all buckets come late. Known once prepared.
        """
        return bool(self._parts)

    def _places(self) -> Iterator[tuple[Tensor, Bucket]]:
        return zip(self._buckets, self._flat.buckets, strict=True)

    def _cut(self) -> list[Tensor]:
        whole = self._flat.gradients_and_tail
        return [whole[place.start : place.stop] for place in self._flat.buckets]

    def begin(self, step: Step) -> None:
        """Forgets the last step."""
        self._step = step
        self._under_way = []

    def start(self, bucket: int) -> None:
        """Starts to sum a bucket whose gradients are final; buckets must come in order."""
        if self._group.size == 1:
            return
        self._under_way.append(self._sum.start(self._weighted(bucket)))

    def _weighted(self, bucket: int) -> Tensor:
        gradients = self._buckets[bucket]
        if self._step.weight != 1.0:
            gradients.mul_(self._step.weight)
        if bucket == 0:
            self._flat.set_tail(self._step.weight, float(self._step.stop))
        return gradients

    def break_off(self) -> None:
        """Waits until the sums that are under way have broken, as they do once the group is revoked."""
        for handle in self._under_way:
            with suppress(PeerLost):
                handle.wait()
        self._under_way = []

    def finish(self, step: Step) -> tuple[float, bool]:
        """Waits for all buckets, starting those that nobody has.

        Args:
            step: as in `begin`; may weigh less if no bucket has been started.

        Returns:
            The weight that the mean stands for, and whether any member wants to stop. Without any weight there
            is no mean, and the gradients are zero.
        """
        self._step = step
        if self._group.size == 1:
            return self._step.weight, self._step.stop
        if len(self._buckets) == 1 and not self._under_way:  # nothing to overlap with: no handle, no thread
            self._sum.run(self._weighted(0))
        else:
            self._finish_buckets()
        weight, stop = self._flat.tail()
        if weight > 0:
            self._flat.divide_by_tail()
        return weight, stop > 0

    def finish_first(self, step: Step) -> tuple[float, bool]:
        """Starts the buckets that nobody has, and waits for the first; for means that come in parts.

        Args:
            step: as in `finish`.

        Returns:
            As `finish`; then each bucket must be taken.
        """
        self._step = step
        self._start_rest()
        self._under_way[0].wait()
        self._weight, stop = self._flat.tail()
        return self._weight, stop > 0

    def take(self, bucket: int) -> Tensor:
        """Waits for a bucket of a mean that comes in parts; gives its mean, or zeros if there is no weight."""
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

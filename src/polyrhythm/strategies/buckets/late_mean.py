"""The weighted mean of a group's gradients, each bucket waited for only when it is wanted.

    gradients  [ bucket 2 | bucket 1 | bucket 0 ]                  filled again while the last step's are on their way
    outgoing   [ p5 | p4  | p3 | p2  | p1 | p0  | tail | times ]   pieces; summed in place, in one order on all ranks

Piece 0 goes first in every order. It carries the tail (the weights and requests to stop), which every bucket needs, and
how long each bucket took its member, from which all derive the same order for the next step. So what is measured
changes the order of sums, and never a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain

import torch
from torch import Tensor

from polyrhythm.communication.all_reduce import AllReduce
from polyrhythm.communication.collective import Collective
from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.buckets.bucket_size import measured_speed
from polyrhythm.strategies.buckets.bucket_times import BucketTimes
from polyrhythm.strategies.buckets.transfer_order import Piece, Speed, cut, urgent_first
from polyrhythm.strategies.step import Step
from polyrhythm.training.flat_parameters import TAIL, FlatParameters

_PROBE_NUMBERS = 1 << 20


class LateMean:
    """Gives `sum_i b_i g_i / sum_i b_i` bucket by bucket, the most urgent first.

    Args:
        group: who takes part.
        flat: whose gradients; they may change as soon as a bucket has been started.
        collective: how they are added up.
        piece_bytes: into pieces of about so much larger buckets are cut; 0: they are not, and go in order.

    Attributes:
        times: of the buckets of the latest step.
        speed: of the collective, as far as it was looked at.
    """

    def __init__(
        self, group: Communicator, flat: FlatParameters, collective: Collective, piece_bytes: int
    ) -> None:
        self._group = group
        self._flat = flat
        self._sum = AllReduce(collective, group, "gradients", in_turn=True)
        self._by_library = not collective.in_messages
        self._alone = group.size == 1
        # One bucket is wanted as a whole.
        self._orders = bool(piece_bytes) and len(flat.buckets) > 1 and not self._alone
        times = 2 * len(flat.buckets) if self._orders else 0
        self._outgoing = flat.gradients if self._alone else flat.gradients.new_zeros(flat.size + TAIL + times)
        most = piece_bytes / flat.vector.element_size() / flat.stands_for if self._orders else 0
        self._pieces = cut(flat.buckets, most)
        self._pieces[0] = Piece(0, self._pieces[0].start, len(self._outgoing))
        self._order: Sequence[int] = range(len(self._pieces))
        self.speed = Speed(0.0, 0.0)
        self._under_way: list[list[Handle]] = [[] for _ in flat.buckets]
        self._started = 0  # buckets
        self._sent = 0  # pieces
        self._step = Step(0)
        self._weight = 1.0
        self._timed = False
        self.times = BucketTimes(group.clock, len(flat.buckets))

    def passed_on(self) -> Collective:
        """Gives the collective for others, with what is known of the links."""
        return self._sum.passed_on()

    def prepare(self, speed: Speed | None = None) -> None:
        """Looks how fast the collective is, if that is of use; all members must call it.

        Args:
            speed: that it was found to have among other members, the same on all: then nobody looks.
        """
        if not self._alone:
            self._sum.prepare()
            memory = self._group.vector_to_sum("gradients", self._outgoing) if self._by_library else None
            self._outgoing = self._outgoing if memory is None else memory
        if speed is not None:
            self.speed = speed
        elif self._orders:
            many = min(_PROBE_NUMBERS, max(piece.stop - piece.start for piece in self._pieces))
            self.speed = measured_speed(self._group, self._sum, self._outgoing[: max(2, many)])

    def begin(self, step: Step) -> None:
        """A step begins; that of before may still be on its way."""
        self._step = step
        self._started = self._sent = 0
        self.times.begin()

    def start(self, bucket: int) -> None:
        """Takes a bucket whose gradients are final, and starts what may start; buckets must come in order."""
        if self._alone:
            return
        if bucket == 0:
            self._write_tail()
        self.times.ready(bucket)
        place = self._flat.buckets[bucket]
        stop = min(place.stop, self._flat.size)
        gradients, out = self._flat.gradients[place.start : stop], self._outgoing[place.start : stop]
        torch.mul(gradients, self._step.weight, out=out)
        self._started = bucket + 1
        while self._sent < len(self._order):
            piece = self._pieces[self._order[self._sent]]
            if piece.bucket >= self._started:
                return
            self._under_way[piece.bucket].append(self._sum.start(self._outgoing[piece.start : piece.stop]))
            self._sent += 1

    def finish(self, step: Step) -> tuple[float, bool]:
        """Starts the buckets that nobody has, and waits for the first piece.

        Args:
            step: as in `begin`; may weigh less if no bucket has been started.

        Returns:
            The weight that the mean stands for, and whether any member wants to stop.
        """
        self._step = step
        if self._alone:
            self._weight = step.weight
            return step.weight, step.stop
        for bucket in range(self._started, len(self._flat.buckets)):
            self.start(bucket)
        self._under_way[0][0].wait()
        self._weight, stops, *times = self._outgoing[self._flat.size :].tolist()
        if times:
            self._plan(times)
        return self._weight, stops > 0

    def take(self, bucket: int) -> Tensor:
        """Waits for a bucket; gives its mean, which holds until the bucket is started again.

        Without any weight there is no mean, and what is given is of no use.
        """
        place = self._flat.buckets[bucket]
        mean = self._outgoing[place.start : min(place.stop, self._flat.size)]
        if self._alone:
            return mean
        began = self.times.use(bucket)
        for handle in self._under_way[bucket]:
            handle.wait()
        self._under_way[bucket] = []
        self.times.waited_since(began)
        return mean.div_(self._weight) if self._weight > 0 else mean

    def break_off(self) -> None:
        """Waits until the sums that are under way have broken, as they do once the group is revoked."""
        for handle in chain.from_iterable(self._under_way):
            with suppress(PeerLost):
                handle.wait()
        self._under_way = [[] for _ in self._flat.buckets]

    def _write_tail(self) -> None:
        """Says what this member brings to the step, and how long its buckets took it, ready ones in the step before."""
        tail = [self._step.weight, float(self._step.stop)]
        if self._orders:
            tail += [*self.times.ready_s, *self.times.use_s]
        self._outgoing[self._flat.size :] = self._outgoing.new_tensor(tail)

    def _plan(self, times: list[float]) -> None:
        """Orders the pieces of the next step by all members' times; in the first step none are known."""
        if self._timed:
            mean_s = [seconds / self._group.size for seconds in times]
            buckets = len(self._flat.buckets)
            self._order = urgent_first(self._pieces, mean_s[:buckets], mean_s[buckets:], self.speed)
        self._timed = True

"""Synchronous SGD with lazy updates.

Wu, Yan, Shan, Dang, Sun, "Deep Image: Scaling up Image Recognition", 2015, arXiv 1501.02876, section 3.1.

    backward of layer l         ─▶ its gradients are sent at once
    forward of layer l (next)   ─▶ waits for them;  w_l' = w_l - lr * sum_i b_i g_i,l / sum_i b_i

b_i = samples in worker i's batch, g_i,l = their mean gradient of layer l. There is no staleness: the results are those
of `synchronous`, bit for bit. But the transfer of a layer may last until its parameters are used again.

    synchronous   | forward |  backward  |·transfer·| forward | …
    lazy          | forward |  backward  | forward |  …                the first layers are transferred first
                       transfers: ──last layers──▶◀first▶◀──last layers──▶

Operations over all gradients before the first update, such as clipping by the global norm, are not possible. float16 is
possible, because each worker knows before it sends whether its step overflowed.

Gradients are copied into a separate buffer, and summed there:

    gradients  [ bucket 2 | bucket 1 | bucket 0 ]                  filled again while the last step's are being sent
    outgoing   [ p5 | p4  | p3 | p2  | p1 | p0  | tail | times ]   pieces; summed in place, in one order on all ranks

Piece 0 is always the first. It carries the tail (weights and stop requests), which every bucket needs, and the measured
times of each bucket on its worker, from which all workers derive the same order for the next step. So measurements
change the order of the sums, but never a sum.

When a worker fails, a step may be incomplete: some buckets have been updated, on all workers or on some. Each
bucket's mean is an exchange, and all workers make them in one order, so the most advanced worker has the updates of all
others, and sends its state to them. They repeat the step for the other buckets only. So each bucket gets one update per
step, the same on all workers.

    step s     | … gradients_ready |
    step s + 1                     | use bucket 2: update | use bucket 1: update | ✝ ┃ regroup
    step s, again                                           ┃ … gradients_ready | bucket 2, 1: done, 0: update | …

Departures from the paper:

- Layers are gathered into buckets, and large buckets are cut into pieces. The piece that is used soonest is sent first
  (see `bucket_scheduling`).
- Gradients are weighted by their number of samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polyrhythm.communication.all_reduce import AllReduce
from polyrhythm.communication.collective import COLLECTIVES, Collective
from polyrhythm.communication.collectives.library import Library
from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.exchanger import Exchanger, Sums
from polyrhythm.communication.log import Result
from polyrhythm.errors import RequestError
from polyrhythm.specs import chosen
from polyrhythm.strategies.allreduce.synchronous import Synchronous
from polyrhythm.strategies.bucket_scheduling import (
    BucketBytes,
    BucketTimes,
    Piece,
    Speed,
    bucket_bytes_for,
    cut,
    measured_speed,
    urgent_first,
)
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.state import JOINING, Part, State, StateField
from polyrhythm.strategies.strategy import Facts, Paper, SizesBuckets, Strategy, Traits
from polyrhythm.strategies.worker_part import Logged, Step, WorkerPart, WorkerSetting
from polyrhythm.training.flat_parameters import DEFAULT_BUCKET_BYTES, TAIL, FlatParameters
from polyrhythm.training.optimizer_plan import Pieces, SlicedOptimizer


class LazySynchronous(Strategy, SizesBuckets):
    """All workers average their gradients at every step, and wait for a layer's mean only before the layer's next use.

    Attributes:
        collective: algorithm that sums the gradients: `ring`, `recursive_doubling`, `auto`, … or that of the `library`.
        bucket_bytes: minimum size in bytes of a bucket, which is sent as a whole; `tuned`: from measurements of the
            links.
        piece_bytes: approximate size in bytes of the pieces of larger buckets, between which more urgent pieces can be
            sent; 0: buckets are sent whole and in order, as in `synchronous`.
    """

    paper: ClassVar[Paper] = Paper(
        "Wu, Yan, Shan, Dang, Sun",
        "Deep Image: Scaling up Image Recognition",
        "arXiv",
        2015,
        "1501.02876",
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M(N-1)/N",
        staleness="0",
        use_it="as synchronous, where the network takes longer than the backward pass; one more copy of the gradients",
    )
    why_not_compressed: ClassVar[str] = (
        "its pieces are sent in order of urgency, and compressors need whole gradients: use synchronous"
    )

    collective: Annotated[Collective, chosen("collective", COLLECTIVES)] = Library()
    bucket_bytes: BucketBytes = DEFAULT_BUCKET_BYTES
    piece_bytes: int = Field(default=DEFAULT_BUCKET_BYTES, ge=0)

    def traits(self, workers: int) -> Traits:
        return Traits(slices=workers, waits_between_layers=True)

    def faults(self, workers: int) -> FaultPolicy:
        """Return regrouping, unless a replacement would have to repeat measurements of all workers (`tuned`)."""
        return FaultPolicy.regrouping(workers, possible=self.bucket_bytes != "tuned", may_repeat=True)

    def bucket_bytes_for(self, workers: Communicator | None, like: Tensor) -> int | None:
        return bucket_bytes_for(self.bucket_bytes, workers, self.collective, like)

    def in_own_loop(self) -> Strategy:
        """Return `synchronous`, with the same results: a user's loop may use parameters immediately after a step."""
        return Synchronous(collective=self.collective, bucket_bytes=self.bucket_bytes)

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        return LazyWorker(setting, self.collective, self.piece_bytes)


class LazyWorker(Logged):
    """Sends buckets in the background, and updates each just before its parameters are used again.

    The mean of each bucket is an exchange, in the order of use. A step is done after its last exchange, so
    `exchanger.since` is the step with pending updates, if there are any.
    """

    replicated = True

    fields = StateField("made", list[int], JOINING), StateField("", Part, at="_updated")

    def __init__(self, setting: WorkerSetting, collective: Collective, piece_bytes: int) -> None:
        super().__init__()
        flat = setting.flat
        self._flat = flat
        mean = LateMean(setting.workers, flat, collective, piece_bytes)
        self.exchanger = Exchanger(setting.workers, mean, setting.joined)
        places = [slice(bucket.start, min(bucket.stop, flat.size)) for bucket in flat.buckets]
        self._places = places
        self._optimizer = SlicedOptimizer(setting.plan, flat.vector, places)
        self._pending: set[int] = set()
        self._made: list[int] = []
        """Buckets with the latest update, while others lack it."""
        self._weight = 0.0
        self._learning_rate = 0.0

    def begin(self, step: Step) -> None:
        if step.number == self.exchanger.since:  # the step before is done, or this one is repeated
            self._pending = set()
        self.exchanger.sums.begin(step)

    def before_use(self, bucket: int) -> None:
        if bucket in self._pending:
            self._update(bucket)

    def bucket_ready(self, bucket: int) -> None:
        if bucket in self._pending:
            self._update_unused(bucket)
        self.exchanger.sums.start(bucket)

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Start the remaining buckets; their means are applied later.

        Raises:
            RequestError: parameters were used without announcement (`before_use`), and so before their update.
        """
        for bucket in sorted(self._pending):
            self._update_unused(bucket)
        stop: bool
        self._weight, stop = self.exchanger.sums.finish(step)
        self._learning_rate = learning_rate
        self._pending = set(range(len(self._places)))
        if self._weight > 0:
            self.staleness[0] += 1
        if (
            self.exchanger.workers.size == 1
        ):  # no transfer is pending, and the gradients are about to be zeroed
            self.settle()
        return stop

    def settle(self) -> None:
        """Wait for all buckets and update them, in the order of use."""
        for bucket in sorted(self._pending, reverse=True):
            self._update(bucket)

    def end(self) -> None:
        self.settle()

    @property
    def _updated(self) -> SlicedOptimizer | Pieces:
        """State of the optimizer: bucket by bucket while some have had one update more than others."""
        return self._optimizer.pieces if self._made else self._optimizer

    def state(self) -> State:
        """Return the optimizer's state after all updates."""
        self.settle()
        return super().state()

    def _update(self, bucket: int) -> None:
        def run(mean: LateMean, number: int) -> Result:
            with torch.inference_mode(False):  # else the optimizer's state could not be changed in training
                gradient = mean.take(bucket)
                if self._weight > 0 and bucket not in self._made:
                    self._optimizer.step(bucket, gradient, self._learning_rate)
            return Result(None, self._weight, False)

        self.exchanger.exchange(run)
        self._pending.discard(bucket)
        self._made.append(bucket)
        if not self._pending:
            self.exchanger.since += 1
            self._made = []

    def _update_unused(self, bucket: int) -> None:
        """Update a bucket that the forward pass of this step has not announced; it must have no gradient."""
        place = self._places[bucket]
        if bool(self._flat.gradients[place].any()):
            views = [self._flat.views[at] for at in self._flat.buckets[bucket].parameters]
            name = next(view.name for view in views if bool(view.gradient.any()))
            raise RequestError(
                f"lazy_synchronous: {name} was used without calling its module, before its update: call the "
                "module, or use synchronous"
            )
        self._update(bucket)


_PROBE_NUMBERS = 1 << 20


class LateMean(Sums):
    """Computes `sum_i b_i g_i / sum_i b_i` bucket by bucket, the most urgent first.

    Args:
        group: communicator of the members.
        flat: flat vector with the gradients; those of a bucket may change as soon as the bucket is started.
        collective: algorithm that sums them.
        piece_bytes: approximate size in bytes of the pieces of larger buckets; 0: buckets are sent whole, in order.
        known: speed of the collective, measured earlier among other members; None: `group` is the first.

    Attributes:
        times: measured times of the buckets of the latest step.
        speed: speed of the collective; zeros where it is not measured.
    """

    def __init__(
        self,
        group: Communicator,
        flat: FlatParameters,
        collective: Collective,
        piece_bytes: int,
        known: Speed | None = None,
    ) -> None:
        self._group = group
        self._flat = flat
        self._piece_bytes = piece_bytes
        self._known = known
        self._sum = AllReduce(collective, group, "gradients", in_turn=True)
        self._by_library = not collective.in_messages
        self._alone = group.size == 1
        # A single bucket is needed as a whole.
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

    def over(self, group: Communicator) -> LateMean:
        """Return the same means over other members, with the existing measurements of the links."""
        return LateMean(group, self._flat, self._sum.passed_on(), self._piece_bytes, self.speed)

    def prepare(self) -> None:
        """Measure the speed of the collective, if it is needed and unknown; all members must call it."""
        if self._alone:
            return
        self._sum.prepare()
        memory = self._group.vector_to_sum("gradients", self._outgoing) if self._by_library else None
        self._outgoing = self._outgoing if memory is None else memory
        if self._known is not None:
            stated = torch.zeros(self._group.size, 2, dtype=torch.float64, device=self._flat.vector.device)
            stated[self._group.rank] = stated.new_tensor(
                [self._known.latency_s, self._known.seconds_per_number]
            )
            self._group.all_reduce(stated)
            self.speed = Speed(*stated.amax(0).tolist())  # joining workers have only zeros
        elif self._orders:
            many = min(_PROBE_NUMBERS, max(piece.stop - piece.start for piece in self._pieces))
            self.speed = measured_speed(self._group, self._sum, self._outgoing[: max(2, many)])

    def begin(self, step: Step) -> None:
        """Begin a step; transfers of the step before may still be pending."""
        self._step = step
        self._started = self._sent = 0
        self.times.begin()

    def start(self, bucket: int) -> None:
        """Add a bucket with final gradients, and start all pieces that may start; buckets must be added in order."""
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
        """Start the buckets not started yet, and wait for the first piece.

        Args:
            step: step as in `begin`; its weight may be less if no bucket has been started.

        Returns:
            The sum of all members' weights, and whether any member has received a stop request.
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
        """Wait for a bucket; return its mean, `(n,)`, valid until the bucket is started again.

        If all weights are 0, there is no mean, and the returned values are meaningless.
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

    @property
    def pending(self) -> Iterator[Handle]:
        return chain.from_iterable(self._under_way)

    def _write_tail(self) -> None:
        """Write this member's weight in the step, and the times of its buckets in the step before."""
        tail = [self._step.weight, float(self._step.stop)]
        if self._orders:
            tail += [*self.times.ready_s, *self.times.use_s]
        self._outgoing[self._flat.size :] = self._outgoing.new_tensor(tail)

    def _plan(self, times: list[float]) -> None:
        """Order the pieces of the next step by all members' mean times; the first step has no times yet."""
        if self._timed:
            mean_s = [seconds / self._group.size for seconds in times]
            buckets = len(self._flat.buckets)
            self._order = urgent_first(self._pieces, mean_s[:buckets], mean_s[buckets:], self.speed)
        self._timed = True

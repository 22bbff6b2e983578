"""Synchronous data-parallel SGD.

Chen, Pan, Monga, Bengio, Jozefowicz, "Revisiting Distributed Synchronous SGD", ICLR workshop 2016, arXiv
1604.00981, for the update rule; Wu et al., "Deep Image", 2015, arXiv 1501.02876, for the exchange.

    w' = w - lr * sum_i b_i g_i / sum_i b_i        b_i samples in worker i's batch, g_i their mean gradient

Every worker runs the same optimizer on the same sums, and so has the same bits. With `transfer`, gradients are sent as
float16 or bfloat16 (see `gradient_mean`); with `compress`, they are sent compressed (see `compressed_mean`).

Between hosts, buckets are updated one by one as their sums arrive; the update of a step is atomic:

    sums      ── bucket 0 ──▶── bucket 1 ──▶── bucket 2 ──▶
    update    copy 0 ········ 0, copy 1 ···· 1 ············ 2 │ complete
                                    └─ failure: restore 0 ─▶ the step is repeated from the unchanged state

The values that an update will change are copied while the bucket's sum is pending. The last bucket is not copied: once
its sum has arrived, no failure is possible.

Departure from the papers: gradients are weighted by their number of samples, where the papers assume equal batches.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from torch import Tensor

from polyrhythm.communication.collective import COLLECTIVES, Collective
from polyrhythm.communication.collectives.library import Library
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.exchanger import Exchanger
from polyrhythm.communication.log import Result
from polyrhythm.errors import OutOfStep, RequestError
from polyrhythm.specs import chosen
from polyrhythm.strategies.bucket_scheduling import BucketBytes, bucket_bytes_for
from polyrhythm.strategies.compressing import Compressible
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.gradient_mean import GradientMean, Transfer, gradient_mean
from polyrhythm.strategies.resharding import Resharding
from polyrhythm.strategies.state import JOINING, OWN, Part, State, StateField, Stateful, below
from polyrhythm.strategies.strategy import (
    AveragesGradients,
    Facts,
    GroupOutput,
    Paper,
    SizesBuckets,
    Traits,
)
from polyrhythm.strategies.worker_part import PLACES, Logged, OptimizerSource, Step, WorkerPart, WorkerSetting
from polyrhythm.training.flat_optimizer import ELEMENTWISE, FlatOptimizer, UndoLog
from polyrhythm.training.flat_parameters import DEFAULT_BUCKET_BYTES, FlatParameters
from polyrhythm.training.joint_optimizer import SteppedOnModel
from polyrhythm.training.optimizer_plan import OptimizerPlan, OwnOptimizer, SlicedOptimizer


class Synchronous(Compressible, SizesBuckets, AveragesGradients):
    """All workers average their gradients at every step.

    Attributes:
        collective: algorithm that sums the gradients: `ring`, `recursive_doubling`, `auto`, … or that of the `library`.
        bucket_bytes: minimum size in bytes of a bucket, which is sent as a whole; `tuned`: from measurements of the
            links.
        transfer: dtype in which gradients are sent: `full`, their own, or `float16` or `bfloat16`, with half the bytes.
        compress: compressor of the gradients; None: none.
    """

    paper: ClassVar[Paper] = Paper(
        "Chen, Pan, Monga, Bengio, Jozefowicz",
        "Revisiting Distributed Synchronous SGD",
        "ICLR workshop",
        2016,
        "1604.00981",
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M(N-1)/N",
        staleness="0",
        use_it="equally fast machines on a fast network; the same result as one large batch",
    )

    collective: Annotated[Collective, chosen("collective", COLLECTIVES)] = Library()
    bucket_bytes: BucketBytes = DEFAULT_BUCKET_BYTES
    transfer: Transfer = "full"

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        super().check(workers, plan)
        if self.compress is not None and self.transfer != "full":
            raise RequestError(
                f"transfer={self.transfer} and compress={self.compress.name} both set the format of messages: give one"
            )

    def traits(self, workers: int) -> Traits:
        compress = self.compress
        if compress is None:
            exact = self.transfer == "full"
            return Traits(output=GroupOutput.GRADIENTS, slices=workers, exact_sums=exact)
        return Traits(exact_sums=False, slices=workers, sends_by_value=compress.by_value)

    def faults(self, workers: int) -> FaultPolicy:
        """Return regrouping, unless a replacement would have to repeat measurements of all workers (`tuned`)."""
        return FaultPolicy.regrouping(workers, possible=self.bucket_bytes != "tuned")

    def bucket_bytes_for(self, workers: Communicator | None, like: Tensor) -> int | None:
        return bucket_bytes_for(self.bucket_bytes, workers, self.collective, like)

    def gradient_mean(self, group: Communicator, flat: FlatParameters) -> GradientMean:
        if self.compress is None:
            return gradient_mean(group, flat, self.collective, self.transfer)
        from polyrhythm.strategies.compressed_mean import CompressedMean  # no other run pays for it

        return CompressedMean(group, flat, self.compress, self.collective)

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        return SynchronousWorker(setting, self.gradient_mean(setting.workers, setting.flat))

    def resharding(self, before: int, after: int) -> Resharding:
        if self.compress is None:
            return super().resharding(before, after)
        from polyrhythm.strategies.compressed_mean import of_compressed  # no other run pays for it

        return of_compressed(before, after)


_KEPT = "mean."


class SynchronousWorker(Logged):
    """All-reduces each bucket during the backward pass, then updates, between hosts bucket by bucket.

    In training, sums are in place. A user's own loop cannot repeat a step, so gradients are kept until the mean has
    arrived, and the mean until all workers have it.
    """

    replicated = True
    follows = OptimizerSource.OBJECT
    averaged, mean_weight = 0, 0.0
    fields = (
        StateField("mean", Part, OWN),
        StateField("averaged", int, JOINING, at="averaged"),
        StateField("", Part, at="_optimizer"),
    )

    def __init__(self, setting: WorkerSetting, mean: GradientMean) -> None:
        super().__init__()
        self._joined = setting.joined
        self._flat = setting.flat
        self.replicated = not mean.remembers
        self._plan = setting.plan
        self._optimizer: FlatOptimizer | OwnOptimizer | SteppedOnModel | BucketwiseUpdate = (
            setting.plan.joint or setting.plan.whole(setting.flat.vector)
        )
        self.exchanger = Exchanger(setting.workers, mean, self._met)
        # For loops that call `average` and `update`.
        self._weight = 1.0
        self._contribution = self._means = torch.empty(0)

    def begin(self, step: Step) -> None:
        self.exchanger.sums.begin(step)

    def bucket_ready(self, bucket: int) -> None:
        self.exchanger.sums.start(bucket)

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        optimizer, flat = self._optimizer, self._flat

        def run(mean: GradientMean, number: int) -> Result:
            if isinstance(optimizer, BucketwiseUpdate):
                return Result(None, *optimizer.step(mean, step, learning_rate))
            mean.learning_rate = learning_rate
            weight, stop = mean.finish(step)
            if weight > 0:  # else all workers skip the step, as after a float16 overflow
                optimizer.step(flat.gradients, learning_rate)
            return Result(None, weight, stop)

        _, weight, stop = self.exchanger.exchange(run)
        self.exchanger.since = step.number + 1
        if weight > 0:
            self.staleness[0] += 1
        self.mean_weight = weight
        return stop

    def average(self, step: Step, place: int = 0) -> None:
        flat = self._flat
        # Sums of 16-bit numbers would not be exact.
        place = place if flat.vector.element_size() > 2 else 0
        missing = flat.without_gradient
        recovers = self.exchanger.recover is not None
        if recovers:
            self._make_room()
            self._contribution.copy_(flat.gradients)

        def run(mean: GradientMean, number: int) -> Result:
            members = self.exchanger.workers
            if recovers:
                flat.gradients.copy_(self._contribution)
            mean.word = place + (PLACES + 1) * bool(missing)
            mean.begin(step)
            try:
                weight, _ = mean.finish(step)
            finally:
                mean.word = None
            uneven, elsewhere = divmod(mean.words - members.size * place, PLACES + 1)
            if members.size > 1 and (elsewhere or not 0 <= uneven <= members.size):
                raise OutOfStep("workers are at different places of their programs")
            apart = uneven and members.size > 1
            if not (recovers or apart):
                return Result(None, weight, False)
            kept = self._means[number % 2] if recovers else flat.gradients.new_empty(len(flat.views))
            there = kept[-len(flat.views) :]
            there.fill_(float(step.weight > 0 or not apart))
            there[list(missing)] = 0.0
            if apart:
                members.all_reduce(there)
            if recovers:
                kept[: flat.size].copy_(flat.gradients)
            return Result(kept, weight, False)

        self._use(self.exchanger.exchange(run))
        self.averaged += 1

    def _use(self, result: Result) -> None:
        """Set the gradients to a mean, and `without_gradient` to the parameters without a gradient on any worker."""
        if result.vector is not None:
            there = result.vector[-len(self._flat.views) :]
            if self.exchanger.relayed:
                self._flat.gradients.copy_(result.vector[: self._flat.size])
            self._flat.without_gradient = tuple((there == 0).nonzero().flatten().tolist())
        self.mean_weight = self._weight = result.weight

    def _make_room(self) -> None:
        """Allocate memory for this worker's contribution, for the latest mean, and for the next one."""
        if self._contribution.shape != self._flat.gradients.shape:
            self._contribution = torch.empty_like(self._flat.gradients)
            self._means = self._contribution.new_empty(2, self._flat.size + len(self._flat.views))

    def update(self, learning_rate: float) -> None:
        assert not isinstance(self._optimizer, BucketwiseUpdate), "the user's own optimizer takes the vector"
        self.averaged = 0
        if self._weight > 0:
            self._optimizer.step(self._flat.gradients, learning_rate)
            self.staleness[0] += 1

    def _met(self, workers: Communicator) -> None:
        """Choose bucketwise or whole updates: `in_parts` is known only after the links are measured."""
        self._joined(workers)
        if isinstance(self._optimizer, SteppedOnModel):
            self._optimizer.over(workers)
        by_bucket = BucketwiseUpdate.fits(self._plan, self.exchanger.sums)
        if by_bucket == isinstance(self._optimizer, BucketwiseUpdate):
            return
        state = self._optimizer.state()
        self._optimizer = (
            BucketwiseUpdate(self._plan, self._flat) if by_bucket else self._plan.whole(self._flat.vector)
        )
        self._optimizer.load_state(state)

    def to_enter_with(self) -> State:
        return self.save_fields(self.fields)

    def enter(self, state: State, step: int) -> None:
        """Copy another worker's state, except the compression errors, which are separate on each worker."""
        super().enter(state, step)
        mean = self._mean
        if mean is not None:
            mean.commit()  # the step failed only here: the other worker has received this one's contribution
            own, stated = mean.state()
            common = {name: value for name, value in below(_KEPT, state[0]).items() if "factor." in name}
            mean.load_state((common | own, stated))

    def take_part(self, joins: int) -> None:
        if self.averaged > 0:
            log = self.exchanger.log
            self.exchanger.relayed = True
            self._use(log.kept[log.merged - 1])

    @property
    def _mean(self) -> GradientMean | None:
        """The mean of the gradients, if it keeps anything from step to step."""
        return self.exchanger.sums if self.exchanger.sums.remembers else None


class BucketwiseUpdate(Stateful):
    """Updates each bucket when its mean gradient has arrived, while the sums of later buckets are pending.

    Args:
        plan: plan of an elementwise optimizer; see `fits`.
        flat: parameters that are updated.
    """

    fields = (StateField("", Part, at="_optimizer"),)  # as of an optimizer of the whole vector

    def __init__(self, plan: OptimizerPlan, flat: FlatParameters) -> None:
        places = [slice(bucket.start, min(bucket.stop, flat.size)) for bucket in flat.buckets]
        self._optimizer = SlicedOptimizer(plan, flat.vector, places)
        parts = zip(places[:-1], self._optimizer.parts[:-1], strict=True)
        self._undo = [UndoLog(flat.vector[place], part) for place, part in parts]

    @staticmethod
    def fits(plan: OptimizerPlan, mean: GradientMean) -> bool:
        """Return whether updates can be bucketwise: an elementwise plan of no user's object, and means in parts."""
        elementwise = plan.kind in ELEMENTWISE and plan.clip_norm is None
        return bool(plan.spans) and plan.own is None and elementwise and mean.in_parts

    def step(self, mean: GradientMean, step: Step, learning_rate: float) -> tuple[float, bool]:
        """Average the remaining buckets, and update; on any exception the vector and the state are restored.

        Args:
            mean: mean of this step; some of its buckets may have been started.
            step: present step; see `GradientMean.finish`.
            learning_rate: learning rate of the update.

        Returns:
            The sum of all members' weights (0: nothing is updated), and whether any member has received a stop request.

        Raises:
            PeerLost: a sum failed.
        """
        weight, stop = mean.finish_first(step)
        for bucket in range(len(self._undo) + 1):
            if weight > 0 and bucket < len(self._undo):
                self._undo[bucket].note()
            gradient = self._taken(mean, bucket, weight)
            if weight > 0:
                self._optimizer.step(bucket, gradient, learning_rate)
        return weight, stop

    def _taken(self, mean: GradientMean, bucket: int, weight: float) -> Tensor:
        try:
            return mean.take(bucket)
        except BaseException:
            for log in self._undo[:bucket] if weight > 0 else ():
                log.restore()
            raise

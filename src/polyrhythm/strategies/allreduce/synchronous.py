"""Synchronous data-parallel SGD.

Chen, Pan, Monga, Bengio, Jozefowicz, "Revisiting Distributed Synchronous SGD", ICLR workshop 2016, arXiv
1604.00981, for the rule as all systems have it; Wu et al., "Deep Image", 2015, arXiv 1501.02876, for its
exchange.

    w' = w - lr * sum_i b_i g_i / sum_i b_i        b_i samples in worker i's batch, g_i their mean gradient

Every worker runs the same optimiser on the same sums, and so holds the same bits. With `transfer`, gradients
travel as float16 or bfloat16 (see `gradient_mean`).

Between hosts the update follows the sums bucket by bucket, and is made as a whole or not at all:

    sums      ── bucket 0 ──▶── bucket 1 ──▶── bucket 2 ──▶
    update    note 0 ········ 0, note 1 ···· 1 ············ 2 │ whole
                                    └─ lost: 0 as it was ─▶ the step starts again, as if nothing had changed

While a sum travels there is time to copy what its update will change. The last bucket is not copied: once its
sum has arrived, nothing can fail any more.

Departure from the papers: gradients are weighted with their samples, where the papers assume equal batches.
So a ragged last batch counts for what it is.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from torch import Tensor

from polyrhythm.communication.collective import COLLECTIVES, Collective
from polyrhythm.communication.collectives.library import Library
from polyrhythm.communication.communicator import Communicator
from polyrhythm.specs import chosen
from polyrhythm.strategies.bucket_scheduling import BucketBytes, bucket_bytes_for
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.gradient_mean import GradientMean, Transfer, gradient_mean
from polyrhythm.strategies.state import State
from polyrhythm.strategies.strategy import (
    AveragesGradients,
    Facts,
    GroupOutput,
    Paper,
    SizesBuckets,
    Strategy,
    Traits,
)
from polyrhythm.strategies.worker_part import OverlapsBackward, Regroups, Step, WorkerPart, WorkerSetting
from polyrhythm.training.flat_optimizer import ELEMENTWISE, FlatOptimizer, UndoLog
from polyrhythm.training.flat_parameters import DEFAULT_BUCKET_BYTES, FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan, SlicedOptimizer


class Synchronous(Strategy, SizesBuckets, AveragesGradients):
    """All workers average their gradients at every step.

    Attributes:
        collective: how gradients are added up; `ring`, `recursive_doubling`, `auto`, … or the `library`'s own.
        bucket_bytes: least bytes of a bucket, which travels as one; `tuned`: as the links are measured to want it.
        transfer: as what gradients travel: `full`, as what they are, or with half the bytes as `float16` or `bfloat16`.
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
        use_it="even machines on a good network; the same result as one large batch",
        when_a_worker_dies="the others regroup at the last whole step and go on; a successor joins them",
    )

    collective: Annotated[Collective, chosen("collective", COLLECTIVES)] = Library()
    bucket_bytes: BucketBytes = DEFAULT_BUCKET_BYTES
    transfer: Transfer = "full"

    def traits(self, workers: int) -> Traits:
        """Return those of one large batch."""
        return Traits(output=GroupOutput.GRADIENTS, slices=workers, exact_sums=self.transfer == "full")

    def faults(self, workers: int) -> FaultPolicy:
        """Return regrouping, unless a successor would have to measure what the others have measured before."""
        return FaultPolicy.regrouping(workers, possible=self.bucket_bytes != "tuned")

    def bucket_bytes_for(self, workers: Communicator | None, like: Tensor) -> int | None:
        """As asked, or as measured."""
        return bucket_bytes_for(self.bucket_bytes, workers, self.collective, like)

    def gradient_mean(self, group: Communicator, flat: FlatParameters) -> GradientMean:
        """Averages with the collective asked for."""
        return gradient_mean(group, flat, self.collective, self.transfer)

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        """Return the part of one worker."""
        return SynchronousWorker(setting, self.collective, self.transfer)


class SynchronousWorker(Regroups, OverlapsBackward):
    """All-reduces each bucket while the backward pass goes on, then steps, between hosts bucket by bucket."""

    replicated: ClassVar[bool] = True

    def __init__(self, setting: WorkerSetting, collective: Collective, transfer: Transfer) -> None:
        super().__init__()
        self._workers = setting.workers
        self._flat = setting.flat
        self._mean = gradient_mean(setting.workers, setting.flat, collective, transfer)
        self._plan = setting.plan
        self._optimizer: FlatOptimizer | BucketwiseUpdate = setting.plan.build(setting.flat.vector)

    def start(self, step: int) -> int:
        """Copy worker 0's parameters."""
        self._workers.broadcast(self._flat.vector)
        self._prepare()
        return step

    def begin(self, step: Step) -> None:
        """Readies the mean."""
        self._mean.begin(step)

    def bucket_ready(self, bucket: int) -> None:
        """Start to average a bucket."""
        self._mean.start(bucket)

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Averages what is left, and updates this worker's own copy."""
        if isinstance(self._optimizer, BucketwiseUpdate):
            weight, stop = self._optimizer.step(self._mean, step, learning_rate)
        else:
            weight, stop = self._mean.finish(step)
            if weight > 0:  # else everyone sat the step out, as float16 makes them do
                self._optimizer.step(self._flat.gradients, learning_rate)
        if weight > 0:
            self.staleness[0] += 1
        return stop

    def break_off(self) -> None:
        """Abandon the sums under way."""
        self._mean.break_off()

    def regroup(self, workers: Communicator, members: tuple[int, ...]) -> None:
        """Averages over others from now on."""
        self._mean = self._mean.over(workers)
        self._prepare()

    def _prepare(self) -> None:
        """Prepares the mean, and has the optimiser work as it comes: whether in parts is known only then."""
        self._mean.prepare()
        by_bucket = BucketwiseUpdate.fits(self._plan, self._mean)
        if by_bucket == isinstance(self._optimizer, BucketwiseUpdate):
            return
        state = self._optimizer.state()
        self._optimizer = (
            BucketwiseUpdate(self._plan, self._flat) if by_bucket else self._plan.build(self._flat.vector)
        )
        self._optimizer.load_state(*state)

    def state(self) -> State:
        """Return the optimizer's state."""
        return self._optimizer.state()

    def load_state(self, state: State) -> None:
        """Restore the optimizer's state."""
        self._optimizer.load_state(*state)


class BucketwiseUpdate:
    """Updates each bucket when its mean gradient is there, while later ones travel.

    Args:
        plan: of an optimiser that treats every number alike; see `fits`.
        flat: what is updated.
    """

    def __init__(self, plan: OptimizerPlan, flat: FlatParameters) -> None:
        places = [slice(bucket.start, min(bucket.stop, flat.size)) for bucket in flat.buckets]
        self._optimizer = SlicedOptimizer(plan, flat.vector, places)
        parts = zip(places[:-1], self._optimizer.parts[:-1], strict=True)
        self._undo = [UndoLog(flat.vector[place], part) for place, part in parts]

    @staticmethod
    def fits(plan: OptimizerPlan, mean: GradientMean) -> bool:
        """Return whether an optimiser that changes something may work on buckets, whose gradients come one by one."""
        return bool(plan.spans) and plan.kind in ELEMENTWISE and mean.comes_in_parts

    def step(self, mean: GradientMean, step: Step, learning_rate: float) -> tuple[float, bool]:
        """Averages what is left, and updates; whatever ends the waiting leaves the vector and the state as they were.

        Args:
            mean: of this step, some buckets of which have been started.
            step: as for `GradientMean.finish`.
            learning_rate: as for `FlatOptimizer.step`.

        Returns:
            The weight that the mean stands for, and whether any member wants to stop. Without any weight nothing is
            updated.

        Raises:
            PeerLost: a sum has broken.
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
                log.take_back()
            raise

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state that an optimizer of the whole vector would have."""
        return self._optimizer.state()

    def load_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Restore what `state` returned, here or of that optimizer."""
        self._optimizer.load_state(tensors, facts)

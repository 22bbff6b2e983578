"""Synchronous data-parallel SGD.

Chen, Pan, Monga, Bengio, Jozefowicz, "Revisiting Distributed Synchronous SGD", ICLR workshop 2016, arXiv
1604.00981, for the rule as all systems have it; Wu et al., "Deep Image", 2015, arXiv 1501.02876, for its
exchange.

    w' = w - lr * sum_i b_i g_i / sum_i b_i        b_i samples in worker i's batch, g_i their mean gradient

Every worker runs the same optimiser on the same sums, and so holds the same bits. With `transfer`, gradients
travel as float16 or bfloat16 (see `gradient_mean`); with `compress`, as few bytes as a compressor makes of them (see
`compressed_mean`).

Between hosts the update follows the sums bucket by bucket, and is made as a whole or not at all:

    sums      ── bucket 0 ──▶── bucket 1 ──▶── bucket 2 ──▶
    update    note 0 ········ 0, note 1 ···· 1 ············ 2 │ whole
                                    └─ lost: 0 as it was ─▶ the step starts again, as if nothing had changed

While a sum travels there is time to copy what its update will change. The last bucket is not copied: once its
sum has arrived, nothing can fail any more.

Departure from the papers: gradients are weighted with their samples, where the papers assume equal batches.
So a smaller batch counts for what it is.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from polyrhythm.communication.collective import COLLECTIVES, Collective
from polyrhythm.communication.collectives.library import Library
from polyrhythm.communication.communicator import Communicator
from polyrhythm.errors import OutOfStep, RequestError, RunError
from polyrhythm.specs import chosen
from polyrhythm.strategies.bucket_scheduling import BucketBytes, bucket_bytes_for
from polyrhythm.strategies.compressing import Compressible
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.gradient_mean import GradientMean, Transfer, gradient_mean
from polyrhythm.strategies.state import Resharding, State, below, prefixed, without
from polyrhythm.strategies.strategy import (
    AveragesGradients,
    Facts,
    GroupOutput,
    Paper,
    SizesBuckets,
    Traits,
)
from polyrhythm.strategies.worker_part import (
    PLACES,
    Follows,
    HoldsMeanGradient,
    OverlapsBackward,
    Regroups,
    Step,
    WorkerPart,
    WorkerSetting,
)
from polyrhythm.training.flat_optimizer import ELEMENTWISE, FlatOptimizer, UndoLog
from polyrhythm.training.flat_parameters import DEFAULT_BUCKET_BYTES, FlatParameters
from polyrhythm.training.joint_optimizer import SteppedOnModel
from polyrhythm.training.optimizer_plan import OptimizerPlan, OwnOptimizer, SlicedOptimizer


class Synchronous(Compressible, SizesBuckets, AveragesGradients):
    """All workers average their gradients at every step.

    Attributes:
        collective: how gradients are added up; `ring`, `recursive_doubling`, `auto`, … or the `library`'s own.
        bucket_bytes: least bytes of a bucket, which travels as one; `tuned`: as the links are measured to want it.
        transfer: as what gradients travel: `full`, as what they are, or with half the bytes as `float16` or `bfloat16`.
        compress: what shrinks gradients before they travel; None: nothing.
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

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        super().check(workers, plan)
        if self.compress is not None and self.transfer != "full":
            raise RequestError(
                f"transfer={self.transfer} and compress={self.compress.name} say as what gradients travel: give one"
            )

    def traits(self, workers: int) -> Traits:
        compress = self.compress
        if compress is None:
            exact = self.transfer == "full"
            return Traits(output=GroupOutput.GRADIENTS, slices=workers, mean_updates=True, exact_sums=exact)
        alone = not (compress.own_momentum or compress.votes)
        return Traits(exact_sums=False, slices=workers, sends_by_value=compress.by_value, plain_alone=alone)

    def faults(self, workers: int) -> FaultPolicy:
        """Return regrouping, unless a successor would have to measure what the others have measured before."""
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


_MEAN = "mean_gradient"
_KEPT = "mean."
_MOST_AVERAGES = 1 << 20
"""More than there are of gradients before an update."""


class SynchronousWorker(Regroups, OverlapsBackward, HoldsMeanGradient):
    """All-reduces each bucket while the backward pass goes on, then steps, between hosts bucket by bucket."""

    replicated = True
    follows = Follows.OBJECT

    def __init__(self, setting: WorkerSetting, mean: GradientMean) -> None:
        super().__init__()
        self._workers = setting.workers
        self._joined = setting.joined
        self._flat = setting.flat
        self._mean = mean
        self.replicated = not mean.remembers
        self._plan = setting.plan
        self._optimizer: FlatOptimizer | OwnOptimizer | SteppedOnModel | BucketwiseUpdate = (
            setting.plan.joint or setting.plan.whole(setting.flat.vector)
        )
        self._mean_weight = 0.0
        # Of loops that average and update apart.
        self._apart = False
        self._averages = 0
        self._breaks = False
        self._weight = 1.0
        self._latest: Tensor | None = None
        self._handed: Tensor | None = None

    def start(self, step: int) -> int:
        self._workers.broadcast(self._flat.vector)
        self._prepare()
        return step

    def begin(self, step: Step) -> None:
        self._mean.begin(step)

    def bucket_ready(self, bucket: int) -> None:
        self._mean.start(bucket)

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        if isinstance(self._optimizer, BucketwiseUpdate):
            weight, stop = self._optimizer.step(self._mean, step, learning_rate)
        else:
            self._mean.learning_rate = learning_rate
            weight, stop = self._mean.finish(step)
            if weight > 0:  # else everyone sat the step out, as float16 makes them do
                self._optimizer.step(self._flat.gradients, learning_rate)
        if weight > 0:
            self.staleness[0] += 1
        self._mean_weight = weight
        return stop

    @property
    def mean_weight(self) -> float:
        return self._mean_weight

    @property
    def averaged(self) -> int:
        return self._averages

    def average(self, step: Step, place: int = 0) -> None:
        self._apart = self._breaks = True
        missing, members = self._flat.without_gradient, self._workers.size
        # Sums of half-width numbers would not be exact.
        place = place if self._flat.vector.element_size() > 2 else 0
        self._mean.word = place + (PLACES + 1) * bool(missing)
        self._mean.begin(step)
        try:
            self._weight, _ = self._mean.finish(step)
            self._mean_weight = self._weight
        finally:
            self._mean.word = None
        uneven, elsewhere = divmod(self._mean.words - members * place, PLACES + 1)
        if members > 1 and (elsewhere or not 0 <= uneven <= members):
            raise OutOfStep("workers are at different places of their programs")
        if uneven and members > 1:
            there = torch.full((len(self._flat.views),), float(step.weight > 0))
            there[list(missing)] = 0.0
            there = there.to(self._flat.vector.device)
            self._workers.all_reduce(there)
            self._flat.without_gradient = tuple((there == 0).nonzero().flatten().tolist())
        fits = self._latest is not None and self._latest.shape == self._flat.gradients.shape
        if self._averages:  # of a sum of passes; from now on each mean is kept until the next one is whole
            self._latest = self._latest if fits else torch.empty_like(self._flat.gradients)
        elif not fits:
            self._latest = None
        if self._latest is not None:
            self._latest.copy_(self._flat.gradients)
        self._averages += 1
        self._breaks = False

    def update(self, learning_rate: float) -> None:
        assert not isinstance(self._optimizer, BucketwiseUpdate), (
            "an optimiser of the user's own takes the vector"
        )
        self._averages = 0
        if self._weight > 0:
            self._optimizer.step(self._flat.gradients, learning_rate)
            self.staleness[0] += 1

    def break_off(self) -> None:
        self._mean.break_off()

    def meetings(self, step: int) -> int:
        """Return the number of means of gradients, where there may be several before an update."""
        return step * _MOST_AVERAGES + self._averages if self._apart else step

    def exchanges(self, step: int) -> int:
        return step

    def regroup(self, workers: Communicator, members: tuple[int, ...]) -> None:
        self._workers = workers
        self._mean = self._mean.over(workers)
        self._prepare()
        if self._handed is not None:
            self._flat.gradients.copy_(self._handed)
            self._handed = None

    def take_over(self, newest: State, done: int, step: int) -> int:
        """Take over the newest worker's state, but for what its compression has kept back, which is its own."""
        if not self._mean.remembers:
            return super().take_over(newest, done, step)
        if done >= 0:  # the step broke here only: the newest worker has had this one's part of it
            self._mean.commit()
        tensors = without(_KEPT, newest[0])
        own, told_of = self._mean.state()
        common = below(_KEPT, newest[0])
        own = {name: value for name, value in common.items() if "factor." in name} | own
        tensors |= prefixed(_KEPT, own)
        return super().take_over((tensors, newest[1] | {"mean": told_of}), done, step)

    def _prepare(self) -> None:
        """Prepare the mean, and have the optimiser work as it comes: whether in parts is known only then."""
        self._mean.prepare()
        self._joined(self._workers)
        if isinstance(self._optimizer, SteppedOnModel):
            self._optimizer.over(self._workers)
        by_bucket = BucketwiseUpdate.fits(self._plan, self._mean)
        if by_bucket == isinstance(self._optimizer, BucketwiseUpdate):
            return
        state = self._optimizer.state()
        self._optimizer = (
            BucketwiseUpdate(self._plan, self._flat) if by_bucket else self._plan.whole(self._flat.vector)
        )
        self._optimizer.load_state(*state)

    def state(self) -> State:
        """Return the optimizer's state, and between `average` and `update` the mean of the gradients.

        Raises:
            RunError: the mean before the one that broke was not kept.
        """
        tensors, facts = self._optimizer.state()
        if self._mean.remembers:
            kept, told_of = self._mean.state()
            tensors = tensors | prefixed(_KEPT, kept)
            facts = facts | {"mean": told_of}
        if not self._averages:
            return tensors, facts
        mean = self._latest if self._breaks else self._flat.gradients
        if mean is None:
            raise RunError(
                "a worker was lost while the first gradients of several backward passes were added up: start again"
            )
        missing = list(self._flat.without_gradient)
        told = {"averaged": self._averages, "weight": self._weight, "without_gradient": missing}
        return {**tensors, _MEAN: mean.clone()}, {**facts, _MEAN: told}

    def load_state(self, state: State) -> None:
        tensors, facts = dict(state[0]), dict(state[1])
        if self._mean.remembers:
            kept = below(_KEPT, tensors)
            self._mean.load_state((kept, facts.pop("mean")))
            tensors = without(_KEPT, tensors)
        self._handed, told = tensors.pop(_MEAN, None), facts.pop(_MEAN, None)
        self._averages = 0
        if told is not None:
            self._apart = True
            self._averages, self._weight = told["averaged"], told["weight"]
            self._flat.without_gradient = tuple(told["without_gradient"])
        self._optimizer.load_state(tensors, facts)


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
        return bool(plan.spans) and plan.own is None and plan.kind in ELEMENTWISE and mean.comes_in_parts

    def step(self, mean: GradientMean, step: Step, learning_rate: float) -> tuple[float, bool]:
        """Average what is left, and update; whatever ends the waiting leaves the vector and the state as they were.

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

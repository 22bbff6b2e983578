"""An update that follows the sums of the gradients, bucket by bucket, and is made as a whole or not at all.

    sums      ── bucket 0 ──▶── bucket 1 ──▶── bucket 2 ──▶
    update    note 0 ········ 0, note 1 ···· 1 ············ 2 │ whole
                                    └─ lost: 0 as it was ─▶ the step is begun again, as one that has changed nothing

While a sum travels there is time to copy what its update will change. Of the last one no copy is made: once its sum is
there, nothing can break any more.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from polyrhythm.strategies.buckets.gradient_mean import GradientMean
from polyrhythm.strategies.step import Step
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizing.optimizer_kinds import ELEMENTWISE
from polyrhythm.training.optimizing.optimizer_plan import OptimizerPlan
from polyrhythm.training.optimizing.sliced_optimizer import SlicedOptimizer
from polyrhythm.training.optimizing.undo_log import UndoLog


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
        """Whether an optimiser may work on buckets, and their gradients come one by one."""
        return plan.kind in ELEMENTWISE and mean.comes_in_parts

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
        """Gives what the optimiser of the whole vector would give."""
        return self._optimizer.state()

    def load_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Takes back what `state` gave, or what that optimiser gave."""
        self._optimizer.load_state(tensors, facts)

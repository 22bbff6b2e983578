"""Gradients inside a group: their mean is for the servers, which own the optimiser."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.strategies.buckets.gradient_mean import GradientMean
from polyrhythm.strategies.parameter_server.groups.inside_part import Contribution
from polyrhythm.strategies.state import State
from polyrhythm.strategies.step import Step
from polyrhythm.training.optimizing.optimizer_plan import OptimizerPlan


class Gradients:
    """One member's side; see `InsidePart`. Every step is a contribution.

    Args:
        mean_of: makes the mean of a group's gradients.
        group: whose member it is.
        plan: the user's optimiser.
    """

    def __init__(
        self, mean_of: Callable[[Communicator], GradientMean], group: Communicator, plan: OptimizerPlan
    ) -> None:
        self.plan = plan
        self.steps = 1
        self.apart = False
        self._mean = mean_of(group)

    def start(self, step: int) -> None:
        """Readies the mean."""
        self._mean.prepare()

    def resume(self, step: int, contributions: int) -> bool:
        """Never: the servers hold all that there is."""
        return False

    def begin(self, step: Step) -> None:
        """Readies the mean for the next step."""
        self._mean.begin(step)

    def bucket_ready(self, bucket: int) -> None:
        """Starts to average a bucket."""
        self._mean.start(bucket)

    def contribute(self, step: Step, learning_rate: float) -> Contribution:
        """Averages what is left."""
        weight, stop = self._mean.finish(step)
        return Contribution(Step(step.number, weight, stop), learning_rate)

    def refresh(self) -> None:
        """Nothing to do."""

    def break_off(self) -> None:
        """Gives up the sums under way."""
        self._mean.break_off()

    def regroup(self, group: Communicator) -> None:
        """Averages over others from now on."""
        self._mean = self._mean.over(group)

    def rest(self) -> None:
        """Nothing is left."""

    def present(self) -> Tensor | None:
        """The flat vector is the model."""
        return None

    def state(self) -> State:
        """Nothing."""
        return {}, {}

    def load_state(self, state: State) -> None:
        """Takes nothing."""

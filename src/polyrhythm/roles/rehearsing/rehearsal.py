"""What is rehearsed: a run without a model, data or results, of which only time and traffic are left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from polyrhythm.data.dealing.sharding import batch_images, steps_per_epoch
from polyrhythm.roles.rehearsing.stand_in import StandIn
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.model_sizes import ModelSizes
from polyrhythm.training.optimizer import OptimizerConfig
from polyrhythm.training.optimizing.optimizer_plan import OptimizerPlan

Gradient = Callable[[int, int, Tensor], None]
_REPORTS, _REPORTS_OF_A_WORKER = 4000, 20


def leave_zeros(worker: int, step: int, gradients: Tensor) -> None:
    """Leaves the gradients zero, as they are before every step."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What is rehearsed.

    Attributes:
        strategy: how the workers share the work.
        workers: how many there are.
        sizes: of the model.
        steps: that every worker takes.
        batch_size: of one worker, for counting images.
        epoch_images: after which an epoch is over, its last step ragged as in training; 0: all batches are full,
            and there is one epoch.
        optimizer: that the strategy runs on the stand-in, whose time is not modelled; None changes nothing.
        gradient: fills the flat gradients of a worker's step in place, given its index, the step and `(E,)` zeros.
        seed: of the times that steps take, where they are drawn.
        exact: whether every number of the model is there, as real networks need it.
        timings: whether workers tell where their steps go.
        still: whether all numbers are zeros that nothing changes, so that nobody need look at them or make them anew.
        data: its name, for people.
        model: its name, for people.
    """

    strategy: Strategy
    workers: int
    sizes: ModelSizes
    steps: int
    batch_size: int = 64
    epoch_images: int = 0
    optimizer: OptimizerConfig | None = None
    gradient: Gradient = leave_zeros
    seed: int = 0
    exact: bool = False
    timings: bool = False
    still: bool = False
    data: str = ""
    model: str = ""

    @cached_property
    def stand_in(self) -> StandIn:
        """The numbers that stand for the model on every worker."""
        if self.exact:
            return StandIn.whole(self.sizes)
        strategy = self.strategy
        return StandIn.small(self.sizes, self.workers, strategy.server_count, strategy.slices(self.workers))

    @property
    def computes_nothing(self) -> bool:
        """Whether gradients are zero, and nothing is made of them."""
        return self.gradient is leave_zeros and self.optimizer is None

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps that every worker takes in an epoch."""
        if not self.epoch_images:
            return self.steps
        return steps_per_epoch(self.epoch_images, self.workers, self.batch_size)

    @property
    def epochs(self) -> int:
        """Epochs, the last one perhaps not whole."""
        return -(-self.steps // self.steps_per_epoch)

    @cached_property
    def steps_per_report(self) -> int:
        """After how many steps a worker says what it has done: a bounded number of events, however many workers."""
        reports = min(_REPORTS_OF_A_WORKER, max(1, _REPORTS // self.workers))
        return -(-self.steps // reports)

    @cached_property
    def learning_rate(self) -> float:
        """Of every step."""
        return self.optimizer.lr if self.optimizer is not None else 0.0

    def images(self, worker: int, step: int) -> int:
        """Gives the images in a worker's batch."""
        if not self.epoch_images:
            return self.batch_size
        in_epoch = step % self.steps_per_epoch
        return batch_images(self.epoch_images, in_epoch, worker, self.workers, self.batch_size)

    def plan(self, flat: FlatParameters) -> OptimizerPlan:
        """Gives the plan of the optimiser."""
        if self.optimizer is None:
            return OptimizerPlan("SGD", (), 0.0)
        parameters = [view.parameter for view in flat.views]
        return OptimizerPlan.of(self.optimizer.create(parameters), flat)

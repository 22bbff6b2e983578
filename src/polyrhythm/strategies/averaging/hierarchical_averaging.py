"""Hierarchical averaging: frequent means of models inside groups, and less frequent ones over all workers.

Lin, Stich, Patel, Jaggi, "Don't use large mini-batches, use local SGD", ICLR 2020, arXiv 1808.07217, section 5
(hierarchical local SGD).

    w_i <- (1/G) * sum_j w_j               over the worker's group, every H1 steps
    w_i <- (1/N) * sum_j w_j               over all workers, every H2 steps

G = `group`, H1 = `steps`, H2 = `steps_between`. Where both means are due, only the mean of all is computed. A group is
G workers with consecutive indices, wherever they run. The last group may be smaller, yet every model has the same
weight in the mean of all. Batch-norm statistics are never averaged in training.

Departure from the paper: any optimizer replaces SGD, and `optimizer_state` selects the treatment of its state at a mean
of all workers. At a mean of a group, the state is kept.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from polyrhythm.errors import RequestError
from polyrhythm.strategies.averaging.rounds.averaging import Averaging
from polyrhythm.strategies.averaging.rounds.model_mean import AtAverage
from polyrhythm.strategies.averaging.rounds.rounds_worker import Rounds, RoundsWorker
from polyrhythm.strategies.strategy import Facts, GroupOutput, Paper
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.quantities import Count


class HierarchicalAveraging(Averaging):
    """Groups of workers average their models frequently, and all workers less frequently.

    Attributes:
        group: number of workers in a group; the last group may have fewer.
        steps: number of steps of each worker between two means inside a group.
        steps_between: number of steps of each worker between two means of all workers.
        optimizer_state: treatment of the optimizer state (momentum etc.) at a mean of all: keep, average or reset.
        collective: algorithm that sums the models.
    """

    paper: ClassVar[Paper] = Paper(
        "Lin, Stich, Patel, Jaggi", "Don't use large mini-batches, use local SGD", "ICLR", 2020, "1808.07217"
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M(R-1)/(RH) + 2M(N-1)/(NK)",
        staleness="0",
        use_it="hosts with several workers each and a much slower network between hosts; K steps between means of all",
    )
    why_not_compressed: ClassVar[str] = (
        "the means of groups and of all would each keep compression errors that the other needs: use local_sgd"
    )
    output: ClassVar[GroupOutput] = GroupOutput.MODELS

    group: int = Field(default=2, ge=2)
    steps: Count = 2
    steps_between: Count = 8
    optimizer_state: AtAverage = "keep"

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        """Reject group sizes and periods that leave no mean inside a group alone.

        Raises:
            RequestError: the group size exceeds the number of workers, or groups average no more often than all do.
        """
        super().check(workers, plan)
        if 1 < workers < self.group:  # a single worker is a complete group
            raise RequestError(
                f"hierarchical_averaging: group={self.group} is larger than all {workers} workers: give a smaller "
                "group, or use local_sgd"
            )
        if self.steps >= self.steps_between:
            raise RequestError(
                f"hierarchical_averaging: groups average every steps={self.steps} and all every steps_between="
                f"{self.steps_between}, so no mean is of a group alone: give a larger steps_between, or use local_sgd"
            )

    @property
    def period(self) -> int:
        return self.steps_between

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        rounds = Rounds(
            steps=self.steps_between,
            collective=self.collective,
            optimizer_state=self.optimizer_state,
            group=self.group,
            group_steps=self.steps,
        )
        return RoundsWorker(setting, rounds)

"""The worker part of all strategies that average models: rounds of local steps.

    worker 0   step step step step ┃ mean, outer rule ┃ step step …
    worker 1   step step step step ┃ mean, outer rule ┃ step step …
                                   └ all meet, and hear who wants to stop

When a run ends in the middle of a round, that round is over too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polyrhythm.communication.collective import Collective
from polyrhythm.strategies.averaging.rounds.local_optimizer import AtAverage, LocalOptimizer
from polyrhythm.strategies.averaging.rounds.model_mean import ModelMean
from polyrhythm.strategies.averaging.rounds.outer import Outer
from polyrhythm.strategies.state import State
from polyrhythm.strategies.step import Step
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting

_OPTIMIZER, _OUTER = "optimizer.", "outer."


def every(steps: int) -> Callable[[int], bool]:
    """Gives a rhythm: tells whether a round of so many steps ends with a step; with 0 none does."""
    return lambda step: steps > 0 and (step + 1) % steps == 0


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How a worker spends its rounds.

    Attributes:
        steps: of a round; 0: the whole run is one.
        first: the step with which the first round begins.
        collective: how models are added up.
        optimizer_state: what becomes of the local optimiser's state at a mean of all.
        outer: what is made of the mean; None: it is the new model.
        group: neighbouring workers that average among themselves more often; 1: none do.
        group_steps: between two means inside a group.
    """

    steps: int
    collective: Collective
    first: int = 0
    optimizer_state: AtAverage = "keep"
    outer: Outer | None = None
    group: int = 1
    group_steps: int = 0


class RoundsWorker(WorkerPart):
    """Trains on its own; at the end of a round all models become one.

    Args:
        setting: the worker's.
        rounds: how it spends them.
    """

    def __init__(self, setting: WorkerSetting, rounds: Rounds) -> None:
        super().__init__()
        self._workers = setting.workers
        self._flat = setting.flat
        self._rounds = rounds
        self._all = ModelMean(setting.workers, setting.flat, rounds.collective)
        self._group = _group_of(setting, rounds)
        self._optimizer = LocalOptimizer(setting.plan, setting.flat, rounds.optimizer_state, self._all)
        self._ends = every(rounds.steps)
        self._group_ends = every(rounds.group_steps)
        self._apart = False
        self._wish = False
        self._heard = False
        self._rate = 0.0
        self._resumed: Tensor | None = None

    def start(self, step: int) -> int:
        """Takes worker 0's parameters, or those of its own that a checkpoint held."""
        if self._resumed is not None:
            self._flat.vector.copy_(self._resumed)
        else:
            self._workers.broadcast(self._flat.vector)
            if self._rounds.outer is not None:
                self._rounds.outer.start(self._flat.vector)
        self._all.prepare()
        if self._group is not None:
            self._group.prepare()
        return step

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Updates this worker's own model, and averages where a round is over."""
        self.update(step.weight, learning_rate)
        self._wish |= step.stop
        self._apart = True
        if self._ends(step.number - self._rounds.first):
            self._heard |= self._all.take(self._wish)
            self._end_round()
        elif self._group is not None and self._group_ends(step.number):
            self._group.take(False)
        return self._heard or (self._wish and self._workers.size == 1)

    def update(self, weight: float, learning_rate: float) -> None:
        """Takes a step with the flat gradients, unless they weigh nothing (an empty batch)."""
        self._rate = learning_rate
        if weight > 0:
            self._optimizer.step(learning_rate)
            self.staleness[0] += 1

    def present(self) -> Tensor | None:
        """Gives the mean of all models as they are; in passing, all hear who wants to stop."""
        if not self._apart:
            return self._rounds.outer.model() if self._rounds.outer is not None else None
        shown, self._heard = self._all.look(self._wish)
        return shown

    def end(self) -> None:
        """Ends the round under way, and leaves the run's model in the flat vector, on all workers."""
        if self._apart:
            self._all.take(False)
            self._end_round()
        model = self._rounds.outer.model() if self._rounds.outer is not None else None
        if model is not None:
            self._flat.vector.copy_(model)

    def state(self) -> State:
        """Gives this worker's own model and optimiser, and the outer rule's state."""
        tensors, facts = self._optimizer.state()
        named = {"vector": self._flat.vector} | _below(_OPTIMIZER, tensors)
        noted: dict[str, Any] = {"apart": self._apart, "rate": self._rate, "optimizer": facts}
        if self._rounds.outer is not None:
            tensors, noted["outer"] = self._rounds.outer.state()
            named |= _below(_OUTER, tensors)
        return named, noted

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave."""
        tensors, facts = state
        self._resumed = tensors["vector"]
        self._apart, self._rate = facts["apart"], facts["rate"]
        self._optimizer.load_state(_above(_OPTIMIZER, tensors), facts["optimizer"])
        if self._rounds.outer is not None:
            self._rounds.outer.load_state((_above(_OUTER, tensors), facts["outer"]))

    def _end_round(self) -> None:
        if self._rounds.outer is not None:
            self._rounds.outer.step(self._flat.vector, self._rate)
        self._optimizer.models_averaged()
        self._apart = False


def _group_of(setting: WorkerSetting, rounds: Rounds) -> ModelMean | None:
    if rounds.group == 1:
        return None
    number, size = setting.workers.rank // rounds.group, setting.workers.size
    members = range(number * rounds.group, min((number + 1) * rounds.group, size))
    group = setting.workers.subgroup(f"averaging group {number}", members)
    return ModelMean(group, setting.flat, rounds.collective)


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _above(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

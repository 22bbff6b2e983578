"""Worker part of all strategies that average models: rounds of local steps.

    worker 0   step step step step ┃ mean, outer rule ┃ step step …
    worker 1   step step step step ┃ mean, outer rule ┃ step step …
                                   └ all synchronize, and receive stop requests

`Rounds` configures them: a preconditioner changes a worker's gradients before its optimizer uses them, and an outer
rule computes the starting point of the next round from the mean of all models. A run that ends in the middle of a round
ends that round too.

A mean is an entry of the log (see `communication.log`); failed workers do not contribute to it. A joining worker starts
with a copy of another worker's model, which counts only once in the next mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from polyrhythm.communication.collective import Collective
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.exchanger import Exchanger
from polyrhythm.communication.log import MODELS, Result
from polyrhythm.strategies.averaging.rounds.model_mean import AtAverage, LocalOptimizer, ModelMean
from polyrhythm.strategies.state import State, below, prefixed
from polyrhythm.strategies.worker_part import (
    Follows,
    HoldsModel,
    Logged,
    Presents,
    Step,
    TakesLocalSteps,
    WorkerPart,
    WorkerSetting,
    Writes,
)
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.natural_gradient import Fisher, natural_gradient


class Outer(Protocol):
    """Rule that computes the start of the next round from the start of a round and the mean of all models at its end.

    Every worker applies it to the same numbers, so all get the same bits without another message.
    """

    def start(self, vector: Tensor) -> None:
        """Start training at `vector`, `(size,)`; it is copied."""

    def step(self, vector: Tensor, learning_rate: float) -> None:
        """Replace the mean of all models by the starting point of the next round, in place.

        Args:
            vector: mean of all models, `(size,)`; on return, the starting point of the next round.
            learning_rate: learning rate of the round's last step.
        """

    def model(self) -> Tensor | None:
        """Return the run's model between two rounds, `(size,)`; None: the start of the next round is the model."""

    def state(self) -> State:
        """Return the state of the rule, for a checkpoint."""

    def load_state(self, state: State) -> None:
        """Restore what `state` returned; `start` is then not called."""


class Preconditioner(Protocol):
    """Rule with a state that changes gradients in place."""

    def apply(self) -> None:
        """Change the flat gradients in place."""

    def state(self) -> State:
        """Return the state of the rule, for a checkpoint."""

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""


class NaturalGradients:
    """Replaces every layer's gradient by its natural gradient, except those of biases and other vectors.

    Args:
        flat: flat vector with the gradients.
        fisher: options of the estimates of the Fisher matrices.
    """

    def __init__(self, flat: FlatParameters, fisher: Fisher) -> None:
        self._flat = flat
        self._fisher = fisher
        self._layers: dict[str, dict[str, Any]] = {view.name: {} for view in flat.views}

    def apply(self) -> None:
        """Change the flat gradients in place."""
        for view in self._flat.views:
            shape = view.parameter.shape
            rows = shape[0] if len(shape) > 1 else 0
            gradient = self._flat.gradients[view.start : view.stop]
            natural = natural_gradient(gradient, rows, self._layers[view.name], self._fisher)
            if natural is not gradient:
                gradient.copy_(natural)

    def state(self) -> State:
        """Return the estimates of the Fisher matrices."""
        tensors = {
            f"{layer}/{name}": value
            for layer, state in self._layers.items()
            for name, value in state.items()
            if isinstance(value, Tensor)
        }
        return tensors, {layer: state["steps"] for layer, state in self._layers.items() if state}

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""
        tensors, steps = state
        self._layers = {view.name: {} for view in self._flat.views}
        for layer, count in steps.items():
            self._layers[layer]["steps"] = count
        for name, value in tensors.items():
            layer, _, key = name.rpartition("/")
            self._layers[layer][key] = value.detach().to(self._flat.vector.device, copy=True)


def every(steps: int) -> Callable[[int], bool]:
    """Return a function that returns whether a round of `steps` steps ends with a step; with 0 steps, none does."""
    return lambda step: steps > 0 and (step + 1) % steps == 0


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Configuration of a worker's rounds.

    Attributes:
        steps: number of steps in a round; 0: the whole run is one round.
        first: first step of the first round; the steps before it are synchronous.
        collective: algorithm that sums the models.
        optimizer_state: treatment of the local optimizer state at a mean of all models.
        preconditioner: preconditioner of the gradients, applied before the local optimizer; None: none.
        outer: rule applied to the mean; None: the mean is the new model.
        group: number of workers in a group that averages more frequently; 1: no groups.
        group_steps: number of steps between two means inside a group.
        mean: constructor of the mean of all models; None: `ModelMean`, of whole models.
    """

    steps: int
    collective: Collective
    first: int = 0
    optimizer_state: AtAverage = "keep"
    preconditioner: Preconditioner | None = None
    outer: Outer | None = None
    group: int = 1
    group_steps: int = 0
    mean: Callable[[Communicator, FlatParameters], ModelMean] | None = None

    def ends(self, step: int) -> bool:
        """Whether a round ends with a step."""
        return step >= self.first and every(self.steps)(step - self.first)

    def group_ends(self, step: int) -> bool:
        """Whether groups average after a step."""
        return self.group > 1 and every(self.group_steps)(step)

    def began(self, step: int) -> int:
        """Return the number of steps done at the start of the current round, after `step` steps."""
        inside = (step - self.first) % self.steps if self.steps else step - self.first
        return step if step < self.first else step - inside


_OPTIMIZER, _OUTER, _PRECONDITIONER = "optimizer.", "outer.", "preconditioner."
KEPT = "kept."
"""Prefix of the state that a mean keeps between rounds."""
_NEVER = -1


class RoundsWorker(WorkerPart, Logged, Presents, HoldsModel, TakesLocalSteps):
    """Takes local steps; at the end of a round all models are replaced by their mean.

    Args:
        setting: setting of the worker.
        rounds: configuration of the rounds.
    """

    def __init__(self, setting: WorkerSetting, rounds: Rounds) -> None:
        super().__init__()
        self._workers = setting.workers
        self._flat = setting.flat
        self._rounds = rounds
        self._worker = setting.workers.rank
        self.group = rounds.group if rounds.group > 1 else 0
        self._of_group: ModelMean | None = None
        self._met_workers = setting.workers
        make = rounds.mean or (lambda group, flat: ModelMean(group, flat, rounds.collective))
        self.exchanger = Exchanger(setting.workers, make(setting.workers, setting.flat), self._met)
        self.exchanger.keeps = True
        if self.group:
            self._of_group = ModelMean(self._near(setting.workers), setting.flat, rounds.collective)
        self._optimizer = LocalOptimizer(setting.plan, setting.flat, rounds.optimizer_state)
        self.writes = Writes.KEPT
        self.follows = Follows.OBJECT if self._optimizer.is_own else Follows.NOTHING
        self._apart = False
        self._weight = 1.0
        self._shares, self._steps = 0.0, 0
        self._beginning: Tensor | None = None
        self._updated = _NEVER
        self._stop_requested = False
        self._heard = False
        self._rate = 0.0
        self._resumed: Tensor | None = None

    def start(self, step: int) -> int:
        self.exchanger.since = self._rounds.began(step)
        if self._resumed is not None:
            self._flat.vector.copy_(self._resumed)
            self._resumed = None
        else:
            if self._worker == 0:  # before any exchange can fail
                self._start_outer()
            self._workers.broadcast(self._flat.vector)
            if self._worker > 0:
                self._start_outer()
        self.exchanger.prepare()
        return step

    def begin_at(self, step: int) -> None:
        """Start at a step with the flat vector as it is, the same on all workers."""
        self.exchanger.since = self._rounds.began(step)
        self._resumed = None
        self._start_outer()

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        if self._updated != step.number:  # else this worker joined at the mean after the step
            self._go_apart()
            self.update(step.weight, learning_rate, step.share)
            self._updated = step.number
        self._rate = learning_rate
        self._stop_requested |= step.stop
        if self._rounds.ends(step.number):
            self._end_round()
            self.exchanger.since = step.number + 1
        elif self._of_group is not None and self._rounds.group_ends(step.number):
            self._meet_group()
        return self._heard or (self._stop_requested and self.exchanger.workers.size == 1)

    def update(self, weight: float, learning_rate: float, share: float = 1.0) -> None:
        """Update with the flat gradients, unless their weight is 0 (an empty batch).

        Args:
            weight: weight of the batch.
            learning_rate: learning rate of the update.
            share: weight of the step in the mean at the end of the round; see `Step.share`.
        """
        self._rate = learning_rate
        self._shares, self._steps = self._shares + share, self._steps + 1
        if weight > 0:
            if self._rounds.preconditioner is not None:
                self._rounds.preconditioner.apply()
            self._optimizer.step(learning_rate)
            self.staleness[0] += 1

    def local_step(self, step: Step, learning_rate: float) -> None:
        if self._updated != step.number:
            self._go_apart()
            self.update(1.0, learning_rate)

    def hear(self, stop: bool) -> None:
        """Record whether all workers stop after a step outside rounds."""
        self._heard |= stop

    def present(self) -> Tensor | None:
        """Return the mean of all current models; stop requests are sent with it."""
        if not self._apart:
            return self._rounds.outer.model() if self._rounds.outer is not None else None
        return self._mean(lambda mean, weight: mean.take(self._stop_requested, weight), aside=MODELS)

    def end(self) -> None:
        """End the current round, and leave the run's model in the flat vector, on all workers."""
        if self._apart:
            self._end_round()
        model = self._rounds.outer.model() if self._rounds.outer is not None else None
        if model is not None:
            self._flat.vector.copy_(model)

    @property
    def has_stopped(self) -> bool:
        """Whether the latest mean carried a stop request, and no worker has taken a step since.

        Inside a round, all workers stop one step later.
        """
        return self._heard and not self._apart

    def to_enter_with(self) -> State:
        tensors, facts = self.state()
        own = {
            name: value for name, value in tensors.items() if name != "vector" and not name.startswith(KEPT)
        }
        return own, facts | {"heard": self._heard}

    def enter(self, state: State, step: int) -> None:
        """Start with another worker's model, without its compression errors."""
        facts = state[1]
        self.load_state(({**state[0], "vector": self._flat.vector}, facts))
        self._resumed, self._heard = None, facts["heard"]

    def come_in(self, joins: int) -> None:
        if joins == MODELS:
            self.present()

    def state(self) -> State:
        tensors, facts = self._optimizer.state()
        named = {"vector": self._flat.vector} | prefixed(_OPTIMIZER, tensors)
        noted: dict[str, Any] = {"apart": self._apart, "rate": self._rate, "optimizer": facts}
        noted |= {"worker": self._worker, "weight": self._weight, "updated": self._updated}
        noted |= {"shares": self._shares, "steps": self._steps}
        if self._apart and self._beginning is not None:
            named["beginning"] = self._beginning
        for prefix, rule in self._rules():
            tensors, noted[prefix] = rule.state()
            named |= prefixed(prefix, tensors)
        kept, told = self.exchanger.sums.state()
        if told:
            named |= prefixed(KEPT, kept)
            noted[KEPT] = told
        return named, noted

    def load_state(self, state: State) -> None:
        """Restore what `state` returned; a state from another worker has weight 0 in the current round."""
        tensors, facts = state
        self._resumed = tensors["vector"]
        self._apart, self._rate, self._updated = facts["apart"], facts["rate"], facts["updated"]
        self._weight = facts["weight"] if facts["worker"] == self._worker or not self._apart else 0.0
        # Older checkpoints lack these: their models have equal weights.
        self._shares, self._steps = facts.get("shares", 0.0), facts.get("steps", 0)
        self._beginning = tensors["beginning"].clone() if "beginning" in tensors else None
        self._optimizer.load_state(below(_OPTIMIZER, tensors), facts["optimizer"])
        for prefix, rule in self._rules():
            rule.load_state((below(prefix, tensors), facts[prefix]))
        self.exchanger.sums.load_state((below(KEPT, tensors), {}))

    def model_in(self, state: State) -> Tensor | None:
        tensors, facts = state
        return tensors["vector"] if facts["weight"] else None

    def _start_outer(self) -> None:
        if self._rounds.outer is not None:
            self._rounds.outer.start(self._flat.vector)

    def _rules(self) -> list[tuple[str, Outer | Preconditioner]]:
        rules = (_OUTER, self._rounds.outer), (_PRECONDITIONER, self._rounds.preconditioner)
        return [(prefix, rule) for prefix, rule in rules if rule is not None]

    def _met(self, workers: Communicator) -> None:
        """Rebuild the mean of the group from its present workers, and measure the links."""
        if self._of_group is None:
            return
        if workers is not self._met_workers:
            self._met_workers = workers
            self._of_group = self._of_group.over(self._near(workers))
        self._of_group.prepare()

    def _near(self, workers: Communicator) -> Communicator:
        members = self.exchanger.members
        number = members[workers.rank] // self.group
        near = [place for place, member in enumerate(members) if member // self.group == number]
        return workers.subgroup(f"averaging group {number}", near)

    def _go_apart(self) -> None:
        """Copy the starting point of a round where changes are averaged."""
        if not self._apart:
            self._shares, self._steps = 0.0, 0
            if self._rounds.mean is not None and self._workers.size > 1:
                self._beginning = self._flat.vector.clone()
        self._apart = True

    @property
    def _part(self) -> float:
        """This worker's mean share of the global batches in the round."""
        return self._shares / self._steps if self._steps else 1.0

    def _mean(
        self, take: Callable[[ModelMean, float], Result], *, aside: int = 0, state: bool = False
    ) -> Tensor:
        """Return the mean of all models, followed by the mean of their optimizer states where these are averaged.

        Args:
            take: function that computes the mean, given the weight of this worker's model.
            aside: see `Entry`.
            state: whether optimizer states may be averaged.
        """

        def run(mean: ModelMean, number: int) -> Result:
            weight = self._weight * self._part
            vector, total, stop = take(mean, weight)
            if total == 0:  # all workers that began the round have failed: those that joined later count
                weight = self._part
                vector, total, stop = take(mean, weight)
            if vector is None:  # no model is finite; NaN makes that visible
                vector = torch.full_like(self._flat.vector, float("nan"))
            averaged = self._optimizer.mean_state(mean, weight, total) if state else None
            return Result(vector if averaged is None else torch.cat([vector, averaged]), total, stop)

        result = self.exchanger.exchange(run, aside=aside)
        self._heard |= result.stop
        assert result.vector is not None, "some model has a weight"
        return result.vector

    def _end_round(self) -> None:
        beginning, updated, stop = self._beginning, self._updated, self._stop_requested
        found = self._mean(lambda mean, weight: mean.at_end(beginning, updated, stop, weight), state=True)
        size = self._flat.size
        self._flat.vector.copy_(found[:size])
        if self._rounds.outer is not None:
            self._rounds.outer.step(self._flat.vector, self._rate)
        self._optimizer.models_averaged(found[size:] if len(found) > size else None)
        self._apart, self._weight, self._beginning = False, 1.0, None

    def _meet_group(self) -> None:
        def run(_: ModelMean, number: int) -> Result:
            assert self._of_group is not None, "only workers with a group call it"
            return self._of_group.take(stop=False, weight=self._weight * self._part)

        mean = self.exchanger.exchange(run, apart=True)
        if mean.vector is not None:
            self._flat.vector.copy_(mean.vector)
        if mean.weight > 0:
            self._weight = 1.0

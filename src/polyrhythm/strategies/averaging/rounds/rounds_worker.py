"""The worker part of all strategies that average models: rounds of local steps.

    worker 0   step step step step ┃ mean, outer rule ┃ step step …
    worker 1   step step step step ┃ mean, outer rule ┃ step step …
                                   └ all meet, and learn who wants to stop

`Rounds` configures them: a preconditioner changes a worker's gradients before its own optimiser uses them,
and an outer rule turns the mean of all models into the point from which the next round starts. When a run
ends in the middle of a round, that round is over too.

A mean is an entry of the log (see `communication.log`): who is lost is missing in it. A newcomer begins with another
worker's model, which counts once in the next mean and not twice.
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
    """A rule from the point where a round began, and the mean of all models at its end, to where the next begins.

    Every worker applies it to the same numbers, so all get the same bits without another message.
    """

    def start(self, vector: Tensor) -> None:
        """Training starts at `vector`, `(size,)`, which is not kept."""

    def step(self, vector: Tensor, learning_rate: float) -> None:
        """A round is over.

        Args:
            vector: `(size,)`, the mean of all models; in place, the point from which all begin the next round.
            learning_rate: of the round's last step.
        """

    def model(self) -> Tensor | None:
        """Return the run's model, `(size,)`, between two rounds, if it is not the point from which workers begin."""

    def state(self) -> State:
        """Return everything that a resumed rule needs."""

    def load_state(self, state: State) -> None:
        """Restore what `state` returned; then `start` is not called."""


class Preconditioner(Protocol):
    """A rule that changes gradients in place, and remembers something of them."""

    def apply(self) -> None:
        """Changes the flat gradients."""

    def state(self) -> State:
        """Return everything that a resumed rule needs."""

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""


class NaturalGradients:
    """Turns every layer's gradient into its natural gradient; biases and the like stay as they are.

    Args:
        flat: whose gradients.
        fisher: how Fisher matrices are estimated.
    """

    def __init__(self, flat: FlatParameters, fisher: Fisher) -> None:
        self._flat = flat
        self._fisher = fisher
        self._layers: dict[str, dict[str, Any]] = {view.name: {} for view in flat.views}

    def apply(self) -> None:
        """Changes the flat gradients."""
        for view in self._flat.views:
            shape = view.parameter.shape
            rows = shape[0] if len(shape) > 1 else 0
            gradient = self._flat.gradients[view.start : view.stop]
            natural = natural_gradient(gradient, rows, self._layers[view.name], self._fisher)
            if natural is not gradient:
                gradient.copy_(natural)

    def state(self) -> State:
        """Return the estimates."""
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
    """Return a function that tells whether a round of `steps` steps ends with a step; with 0 none does."""
    return lambda step: steps > 0 and (step + 1) % steps == 0


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How a worker spends its rounds.

    Attributes:
        steps: of a round; 0: the whole run is one.
        first: the step with which the first round begins; before it workers meet at every step.
        collective: how models are added up.
        optimizer_state: what becomes of the local optimiser's state at a mean of all.
        preconditioner: changes gradients before the local optimiser sees them; None: nothing does.
        outer: what is made of the mean; None: it is the new model.
        group: neighbouring workers that average among themselves more often; 1: none do.
        group_steps: between two means inside a group.
        mean: makes what averages the models of all; None: whole models travel.
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
        """Whether groups meet after a step."""
        return self.group > 1 and every(self.group_steps)(step)

    def began(self, step: int) -> int:
        """Return with how many steps done the round began that a worker is in after `step` steps."""
        inside = (step - self.first) % self.steps if self.steps else step - self.first
        return step if step < self.first else step - inside


_OPTIMIZER, _OUTER, _PRECONDITIONER = "optimizer.", "outer.", "preconditioner."
KEPT = "kept."
"""Of what an average keeps from round to round."""
_NEVER = -1


class RoundsWorker(WorkerPart, Logged, Presents, HoldsModel, TakesLocalSteps):
    """Trains on its own; at the end of a round all models become one.

    Args:
        setting: the worker's.
        rounds: how it spends them.

    Attributes:
        group_met: the step of its group's latest mean.
        met_by_any: the same of all of its group, where a mean that broke is not repeated.
    """

    def __init__(self, setting: WorkerSetting, rounds: Rounds) -> None:
        super().__init__()
        self.group_met = self.met_by_any = _NEVER
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
        self._done = 0
        self._updated = _NEVER
        self._stop_requested = False
        self._heard = False
        self._rate = 0.0
        self._resumed: Tensor | None = None

    def start(self, step: int) -> int:
        self._done, self.exchanger.since = step, self._rounds.began(step)
        if self._resumed is not None:
            self._flat.vector.copy_(self._resumed)
            self._resumed = None
        else:
            if self._worker == 0:  # before anything can break
                self._start_outer()
            self._workers.broadcast(self._flat.vector)
            if self._worker > 0:
                self._start_outer()
        self.exchanger.prepare()
        return step

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        if self._updated != step.number:  # else it came in at the mean after the step
            self._go_apart()
            self.update(step.weight, learning_rate, step.share)
            self._updated = step.number
        self._rate = learning_rate
        self._stop_requested |= step.stop
        if self._rounds.ends(step.number):
            self._end_round()
            self.exchanger.since = step.number + 1
        elif (
            self._of_group is not None
            and self._rounds.group_ends(step.number)
            and step.number > self.met_by_any
        ):
            self._meet_group()
            self.group_met = step.number
        self._done = step.number + 1
        return self._heard or (self._stop_requested and self.exchanger.workers.size == 1)

    def update(self, weight: float, learning_rate: float, share: float = 1.0) -> None:
        """Update with the flat gradients, unless their weight is 0 (an empty batch).

        Args:
            weight: of the batch.
            learning_rate: to update with.
            share: that the step counts in the mean at the end of the round; see `Step.share`.
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
        """Record whether all stop after a step outside rounds."""
        self._heard |= stop

    def present(self) -> Tensor | None:
        """Return the mean of all current models; requests to stop travel with it."""
        if not self._apart:
            return self._rounds.outer.model() if self._rounds.outer is not None else None
        return self._mean(lambda mean, weight: mean.take(self._stop_requested, weight), aside=MODELS)

    def end(self) -> None:
        """End the round under way, and leave the run's model in the flat vector, on all workers."""
        if self._apart:
            self._end_round()
        model = self._rounds.outer.model() if self._rounds.outer is not None else None
        if model is not None:
            self._flat.vector.copy_(model)

    @property
    def has_stopped(self) -> bool:
        """Whether it has heard so in a mean after which nobody has gone on; in a round, all stop a step later."""
        return self._heard and not self._apart

    def begin_round(self, newest: State) -> None:
        """Begin another round after a mean that only others have seen; the flat vector holds what came of it.

        Args:
            newest: the state of a worker that has seen it.
        """
        tensors, facts = newest
        self.exchanger.sums.commit()
        self._optimizer.missed_average(below(_OPTIMIZER, tensors), facts["optimizer"])
        for prefix, rule in self._rules():
            if prefix == _OUTER:
                rule.load_state((below(prefix, tensors), facts[prefix]))
        self._apart, self._weight, self._beginning = False, 1.0, None

    def to_enter_with(self) -> State:
        tensors, facts = self.state()
        own = {
            name: value for name, value in tensors.items() if name != "vector" and not name.startswith(KEPT)
        }
        return own, facts | {"heard": self._heard}

    def enter(self, state: State, step: int) -> None:
        """Begin with another worker's model, but not with what its averages have kept back."""
        facts = state[1]
        self.load_state(({**state[0], "vector": self._flat.vector}, facts))
        self._resumed, self._heard, self._done = None, facts["heard"], step

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
        """Restore what `state` returned; another worker's steps will not count twice."""
        tensors, facts = state
        self._resumed = tensors["vector"]
        self._apart, self._rate, self._updated = facts["apart"], facts["rate"], facts["updated"]
        self._weight = facts["weight"] if facts["worker"] == self._worker or not self._apart else 0.0
        # Older checkpoints do not tell: their models count alike.
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
        """Meet the neighbours that are there."""
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
        """Keep the start of a round where what moves in it travels."""
        if not self._apart:
            self._shares, self._steps = 0.0, 0
            if self._rounds.mean is not None and self._workers.size > 1:
                self._beginning = self._flat.vector.clone()
        self._apart = True

    @property
    def _part(self) -> float:
        """This worker's mean part of the global batches of its round."""
        return self._shares / self._steps if self._steps else 1.0

    def _mean(
        self, take: Callable[[ModelMean, float], Result], *, aside: int = 0, state: bool = False
    ) -> Tensor:
        """Return the mean of all models, and with `state` that of their optimizers behind it.

        Args:
            take: takes the mean, given what this worker's model counts.
            aside: see `Entry`.
            state: whether the optimizers' states are averaged where that is wanted.
        """

        def run(mean: ModelMean, number: int) -> Result:
            weight = self._weight * self._part
            vector, total, stop = take(mean, weight)
            if total == 0:  # all who began the round are lost: those who came later count
                weight = self._part
                vector, total, stop = take(mean, weight)
            if vector is None:  # no model is finite, which must not stay unseen
                vector = torch.full_like(self._flat.vector, float("nan"))
            averaged = self._optimizer.mean_state(mean, weight, total) if state else None
            return Result(vector if averaged is None else torch.cat([vector, averaged]), total, stop)

        result = self.exchanger.exchange(run, aside=aside)
        self._heard |= result.stop
        assert result.vector is not None, "some model counts"
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
            assert self._of_group is not None, "a group that meets is there"
            return self._of_group.take(stop=False, weight=self._weight * self._part)

        mean = self.exchanger.exchange(run, apart=True)
        if mean.vector is not None:
            self._flat.vector.copy_(mean.vector)
        if mean.weight > 0:
            self._weight = 1.0

"""The worker part of all strategies that average models: rounds of local steps.

    worker 0   step step step step ┃ mean, outer rule ┃ step step …
    worker 1   step step step step ┃ mean, outer rule ┃ step step …
                                   └ all meet, and learn who wants to stop

`Rounds` configures them: a preconditioner changes a worker's gradients before its own optimiser uses them,
and an outer rule turns the mean of all models into the point from which the next round starts. When a run
ends in the middle of a round, that round is over too.

A lost worker is missing at a mean. The remaining workers have all taken their steps, and meet again: the mean
is theirs, and what the lost one did in the round is gone. If the mean broke for some only, the others hand on
its result. A successor gets the newest worker's model, which counts once in the next mean and not twice.

Workers that regroup may be at different places: some have presented the model, or averaged within their
group, where for others that broke. They tell each other, and those that missed something leave it out
(`MeetingPlaces`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from polyrhythm.communication.collective import Collective
from polyrhythm.communication.communicator import Communicator
from polyrhythm.strategies.averaging.rounds.model_mean import AtAverage, LocalOptimizer, Mean, ModelMean
from polyrhythm.strategies.state import State, below, prefixed
from polyrhythm.strategies.worker_part import (
    Follows,
    HoldsModel,
    Presents,
    Regroups,
    Step,
    TakesLocalSteps,
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

    def meetings(self, step: int) -> int:
        """Return the number of meetings of all workers in `step` steps."""
        rounds = max(0, step - self.first) // self.steps if self.steps else 0
        return min(step, self.first) + rounds


_OPTIMIZER, _OUTER, _PRECONDITIONER = "optimizer.", "outer.", "preconditioner."
KEPT = "kept."
"""Of what an average keeps from round to round."""
_NEVER = -1


class RoundsWorker(Regroups, Presents, HoldsModel, TakesLocalSteps):
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
        self._worker = setting.workers.rank
        members = tuple(range(setting.workers.size))
        self._places = MeetingPlaces(setting.workers, members, setting.flat, rounds)
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
        self._done = step
        if self._resumed is not None:
            self._flat.vector.copy_(self._resumed)
            self._resumed = None
        else:
            if self._worker == 0:  # before anything can break
                self._start_outer()
            self._workers.broadcast(self._flat.vector)
            if self._worker > 0:
                self._start_outer()
        self._places.prepare()
        return step

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        if self._updated != step.number:  # else only the meeting broke
            self._go_apart()
            self.update(step.weight, learning_rate, step.share)
            self._updated = step.number
        self._rate = learning_rate
        self._stop_requested |= step.stop
        if self._rounds.ends(step.number):
            self._end_round()
        elif self._places.meets_group(step.number):
            self._meet_group(step.number)
        self._done = step.number + 1
        return self._heard or (self._stop_requested and self._places.all.size == 1)

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
        if self._updated != step.number:  # else it is computed again, since the meeting after it broke
            self._go_apart()
            self.update(1.0, learning_rate)

    def hear(self, stop: bool) -> None:
        """Record whether all stop after a step outside rounds."""
        self._heard |= stop

    def present(self) -> Tensor | None:
        """Return the mean of all current models; requests to stop travel with it."""
        if not self._apart:
            return self._rounds.outer.model() if self._rounds.outer is not None else None
        return self._mean_of_all().vector if self._places.presents(self._done) else None

    def end(self) -> None:
        """End the round under way, and leave the run's model in the flat vector, on all workers."""
        if self._apart:
            self._end_round()
        model = self._rounds.outer.model() if self._rounds.outer is not None else None
        if model is not None:
            self._flat.vector.copy_(model)

    def meetings(self, step: int) -> int:
        return self._rounds.meetings(step)

    def regroup(self, workers: Communicator, members: tuple[int, ...]) -> None:
        """Meet others from now on. If all who began the round are lost, the models of those who came later count."""
        agreed = self._places.move(workers, members, Agreed(self._heard, self._weight))
        self._heard = agreed.stops
        if not agreed.counted:
            self._weight = 1.0

    @property
    def has_stopped(self) -> bool:
        """Whether it has heard so in a mean after which nobody has gone on; in a round, all stop a step later."""
        return self._heard and not self._apart

    def take_over(self, newest: State, done: int, step: int) -> int:
        """Start from the newest worker's state, or apply the mean that it has missed and continue after it."""
        if done < 0:
            self.load_state(_without_kept(newest))
            self._resumed, self._places.group_met = None, step - 1
            self._places.presented = step  # after so many steps it goes on, and is at no presentation
        else:
            self._take_missed_mean(newest, local=done >= self._rounds.first)
            step = done + 1
        self._done = step
        return step

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
        kept, told = self._places.all.state()
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
        self._places.all.load_state((below(KEPT, tensors), {}))

    def model_in(self, state: State) -> Tensor | None:
        tensors, facts = state
        return tensors["vector"] if facts["weight"] else None

    def _start_outer(self) -> None:
        if self._rounds.outer is not None:
            self._rounds.outer.start(self._flat.vector)

    def _rules(self) -> list[tuple[str, Outer | Preconditioner]]:
        rules = (_OUTER, self._rounds.outer), (_PRECONDITIONER, self._rounds.preconditioner)
        return [(prefix, rule) for prefix, rule in rules if rule is not None]

    def _go_apart(self) -> None:
        """Keep the start of a round for workers that miss the mean before it."""
        if not self._apart:
            self._shares, self._steps = 0.0, 0
            if self._workers.size > 1:
                self._beginning = self._flat.vector.clone()
        self._apart = True

    @property
    def _counts(self) -> float:
        """What this worker's model counts in a mean: its mean part of the global batches of its round."""
        return self._weight * (self._shares / self._steps if self._steps else 1.0)

    def _mean_of_all(self) -> Mean:
        mean = self._places.all.take(self._stop_requested, self._counts)
        self._heard |= mean.stop_requested
        return mean

    def _end_round(self) -> None:
        mean = self._places.all.at_end(self._beginning, self._updated, self._stop_requested, self._counts)
        self._heard |= mean.stop_requested
        state = self._optimizer.mean_state(self._places.all, self._counts, mean.weight)
        self._flat.vector.copy_(mean.vector)  # from here on nothing can break
        if self._rounds.outer is not None:
            self._rounds.outer.step(self._flat.vector, self._rate)
        self._optimizer.models_averaged(state)
        self._begin_round()

    def _meet_group(self, step: int) -> None:
        assert self._places.group is not None, "a group that meets is there"
        mean = self._places.group.take(stop=False, weight=self._counts)
        self._flat.vector.copy_(mean.vector)
        if mean.weight > 0:
            self._weight = 1.0
        self._places.group_met = step

    def _take_missed_mean(self, newest: State, *, local: bool) -> None:
        """Copy the start of the newest worker's round if it has the common optimizer, or keep its own."""
        tensors, facts = newest
        self._places.all.commit()
        if facts["apart"]:
            self._flat.vector.copy_(tensors["beginning"])
        of_optimizer = below(_OPTIMIZER, tensors), facts["optimizer"]
        if local:
            self._optimizer.missed_average(*of_optimizer)
        else:
            self._optimizer.load_state(*of_optimizer)
        if self._rounds.outer is not None:
            self._rounds.outer.load_state((below(_OUTER, tensors), facts[_OUTER]))
        self._begin_round()

    def _begin_round(self) -> None:
        self._apart, self._weight, self._beginning = False, 1.0, None


def _without_kept(state: State) -> State:
    """Return a state without what its worker's averages had kept back, which is no other's."""
    tensors, facts = state
    return {name: value for name, value in tensors.items() if not name.startswith(KEPT)}, facts


class Agreed(NamedTuple):
    """What those who regroup know together.

    Attributes:
        stops: whether any has heard that it must stop.
        counted: how many models count in the next mean.
    """

    stops: bool
    counted: float


class MeetingPlaces:
    """The communicators over which one worker's models are averaged, with all workers and within its group.

    Args:
        workers: all that are there.
        members: their indices among all workers of the run, in the same order.
        flat: of this worker.
        rounds: says who belongs to a group: neighbours among all workers of the run.

    Attributes:
        all: where all meet.
        group: where this worker's group does; None where it has none.
        presented: steps done when this worker's latest presentation began.
        group_met: the step of its group's latest mean.
    """

    def __init__(
        self, workers: Communicator, members: tuple[int, ...], flat: FlatParameters, rounds: Rounds
    ) -> None:
        self._flat = flat
        self._rounds = rounds
        self.presented = self._presented_to_all = _NEVER
        self.group_met = self._group_met_by_any = _NEVER
        make = rounds.mean or (lambda group, of: ModelMean(group, of, rounds.collective))
        self.all = make(workers, flat)
        self.group: ModelMean | None = None
        if rounds.group > 1:
            self.group = ModelMean(self._near(workers, members), flat, rounds.collective)

    def prepare(self) -> None:
        """Let collectives measure the links; all workers must call it."""
        self.all.prepare()
        if self.group is not None:
            self.group.prepare()

    def move(self, workers: Communicator, members: tuple[int, ...], own: Agreed) -> Agreed:
        """Meet others from now on, who all call it.

        Args:
            workers: as at first.
            members: as at first.
            own: what this worker knows, and brings.
        """
        self.all = self.all.over(workers)
        if self.group is not None:
            self.group = self.group.over(self._near(workers, members))
        told = torch.zeros(2 * workers.size + 2, dtype=torch.float64, device=self._flat.vector.device)
        told[workers.rank] = self.presented - _NEVER
        told[workers.size + workers.rank] = self.group_met - _NEVER
        told[-2:] = told.new_tensor([float(own.stops), own.counted])
        workers.all_reduce(told)
        latest = [int(value) + _NEVER for value in told[:-2].tolist()]
        self._presented_to_all = max(latest[: workers.size])
        self._group_met_by_any = max(
            latest[workers.size :][place] for place in self._group_of(workers, members)
        )
        self.prepare()
        return Agreed(stops=bool(told[-2] > 0), counted=float(told[-1]))

    def presents(self, done: int) -> bool:
        """Whether all meet for a presentation after so many steps; else some have had it already."""
        self.presented = done
        return done > self._presented_to_all

    def meets_group(self, step: int) -> bool:
        """Whether this worker's group meets after a step; else some of it have done so already."""
        return self.group is not None and self._rounds.group_ends(step) and step > self._group_met_by_any

    def _near(self, workers: Communicator, members: tuple[int, ...]) -> Communicator:
        number = members[workers.rank] // self._rounds.group
        return workers.subgroup(f"averaging group {number}", self._group_of(workers, members))

    def _group_of(self, workers: Communicator, members: tuple[int, ...]) -> list[int]:
        """Return the positions of this worker's group among the present workers."""
        number = members[workers.rank] // self._rounds.group
        return [place for place, member in enumerate(members) if member // self._rounds.group == number]

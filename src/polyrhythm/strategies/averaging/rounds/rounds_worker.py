"""Worker part of all strategies that average models: rounds of local steps.

    worker 0   step step step step ┃ mean, outer rule ┃ step step …
    worker 1   step step step step ┃ mean, outer rule ┃ step step …
                                   └ all synchronize, and receive stop requests

`Rounds` configures them: a preconditioner or a correction changes a worker's gradients before its optimizer uses them,
and an outer rule computes the starting point of the next round from the mean of all models. A run that ends in the
middle of a round ends that round too.

A mean is an entry of the log (see `communication.log`); failed workers do not contribute to it. A joining worker starts
with a copy of another worker's model, which counts only once in the next mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyrhythm.communication.collective import Collective
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.exchanger import Exchanger
from polyrhythm.communication.log import MODELS, Result
from polyrhythm.strategies.averaging.rounds.model_mean import AtAverage, LocalOptimizer, ModelMean
from polyrhythm.strategies.state import (
    JOINING,
    MEAN,
    OF_FIRST,
    Conversion,
    Part,
    State,
    StateField,
    Stateful,
    below,
    prefixed,
    reset,
)
from polyrhythm.strategies.worker_part import Logged, OptimizerSource, Step, WorkerSetting, Writes
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.natural_gradient import Fisher, natural_gradient


class Outer(Stateful):
    """Rule that computes the start of the next round from the start of a round and the mean of all models at its end.

    Every worker applies it to the same numbers, so all get the same bits without another message.
    """

    def start(self, vector: Tensor) -> None:
        """Start training at `vector`, `(size,)`; it is copied."""
        raise NotImplementedError

    def step(self, vector: Tensor, learning_rate: float) -> None:
        """Replace the mean of all models by the starting point of the next round, in place.

        Args:
            vector: mean of all models, `(size,)`; on return, the starting point of the next round.
            learning_rate: learning rate of the round's last step.
        """
        raise NotImplementedError

    def model(self) -> Tensor | None:
        """Return the run's model between two rounds, `(size,)`; None: the start of the next round is the model."""
        return None


class Preconditioner(Stateful):
    """Rule with a state that changes gradients in place."""

    def apply(self) -> None:
        """Change the flat gradients in place."""
        raise NotImplementedError


class Correction(Stateful):
    """Rule that adds a term to gradients, which each worker computes from its own rounds and the workers' means.

    Its state is each worker's own: a joining worker, and all after a resume with another number of workers, start as
    at a run's start.

    Attributes:
        averages: whether all workers average a further vector with their models (`to_average`).
    """

    averages: ClassVar[bool] = False

    def apply(self, beginning: Tensor) -> None:
        """Add the term to the flat gradients, in place.

        Args:
            beginning: starting point of the round, `(size,)`.
        """
        raise NotImplementedError

    def to_average(self) -> Tensor:
        """Return a new vector that all workers average at the end of a round, `(size,)`."""
        raise NotImplementedError

    def end_round(self, mean: Tensor, average: Tensor | None, *, counts: bool) -> None:
        """End a round; the flat vector still holds this worker's own model.

        Args:
            mean: mean of the models, `(size,)`.
            average: mean of what `to_average` has returned, `(size,)`; None: nothing.
            counts: whether this worker's model is part of the mean, and no copy of another worker's.
        """
        raise NotImplementedError


class NaturalGradients(Preconditioner):
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
        correction: term added to the gradients, before the local optimizer; None: none.
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
    correction: Correction | None = None
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


_KEPT = "kept."
_NEVER = -1


def _merged_errors(name: str, states: Sequence[State], weights: Sequence[float]) -> State:
    """Return the compression errors of all workers, merged and divided equally among them."""
    if not states[0][1].get(name):
        return {}, {}
    from polyrhythm.strategies.compressed_mean import merged_over  # no other run pays for it

    stated = [(below(name, tensors), facts[name]) for tensors, facts in states]
    return prefixed(name, merged_over(stated, len(states))[0]), {}


def _restarted(name: str, states: Sequence[State], weights: Sequence[float]) -> State:
    """Return nothing: the state of a correction belongs to the images of a worker, and all have others."""
    return {}, {}


class RoundsWorker(Logged):
    """Takes local steps; at the end of a round all models are replaced by their mean.

    Args:
        setting: setting of the worker.
        rounds: configuration of the rounds.
    """

    fields = (
        StateField("vector", Tensor, MEAN, at="_flat.vector"),
        StateField("optimizer", Part, MEAN),
        StateField("outer.", Part, at="_rounds.outer"),
        StateField("preconditioner.", Part, OF_FIRST, at="_rounds.preconditioner"),
        StateField("correction.", Part, Conversion(_restarted, "worker"), at="_rounds.correction"),
        StateField("beginning", Tensor, absent=None),
        StateField("apart", bool),
        StateField("rate", float),
        StateField("updated", int, reset(_NEVER)),
        StateField("weight", float, reset(1.0)),
        StateField("shares", float, absent=0.0),
        StateField("steps", int, absent=0),
        StateField("worker", int, reset(lambda start: start.index), loads=False),
        StateField("heard", bool, JOINING, at="_received"),
        StateField(_KEPT, Part, Conversion(_merged_errors, "worker"), at="exchanger.sums"),
    )

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
        self.follows = OptimizerSource.OBJECT if self._optimizer.is_own else OptimizerSource.NOTHING
        self._apart = False
        self._weight = 1.0
        self._shares, self._steps = 0.0, 0
        self._beginning: Tensor | None = None
        self._updated = _NEVER
        self._stop_requested = False
        self._received = False
        self._rate = 0.0

    def since(self, step: int) -> int:
        return self._rounds.began(step)

    def begin_at(self, step: int) -> None:
        """Start at a step with the flat vector as it is, the same on all workers."""
        self.exchanger.since = self.since(step)
        self.initialize()

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        if self._updated != step.number:  # else this worker joined at the mean after the step
            self._copy_start()
            self.train(step.weight, learning_rate, step.share)
            self._updated = step.number
        self._rate = learning_rate
        self._stop_requested |= step.stop
        if self._rounds.ends(step.number):
            self._end_round()
            self.exchanger.since = step.number + 1
        elif self._of_group is not None and self._rounds.group_ends(step.number):
            self._meet_group()
        return self._received or (self._stop_requested and self.exchanger.workers.size == 1)

    def train(self, weight: float, learning_rate: float, share: float = 1.0) -> None:
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
            if self._rounds.correction is not None:
                assert self._beginning is not None, "copied before the first step of a round"
                self._rounds.correction.apply(self._beginning)
            self._optimizer.step(learning_rate)
            self.staleness[0] += 1

    def local_step(self, step: Step, learning_rate: float) -> None:
        if self._updated != step.number:
            self._copy_start()
            self.train(1.0, learning_rate)

    def record_stop(self, stop: bool) -> None:
        """Record whether all workers stop after a step outside rounds."""
        self._received |= stop

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
        return self._received and not self._apart

    def load_fields(self, fields: Sequence[StateField], state: State) -> None:
        """Restore some fields; another worker's model has no weight in its round, since it counts already."""
        self.initialize()
        self._beginning = torch.empty_like(self._flat.vector)
        super().load_fields(fields, state)
        if self._apart and state[1]["worker"] != self._worker:
            self._weight = 0.0

    def model_in(self, state: State) -> Tensor | None:
        tensors, facts = state
        return tensors["vector"] if facts["weight"] else None

    def initialize(self) -> None:
        if self._rounds.outer is not None:
            self._rounds.outer.start(self._flat.vector)

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

    def _copy_start(self) -> None:
        """Copy the starting point of a round where changes are averaged."""
        if not self._apart:
            self._shares, self._steps = 0.0, 0
            if self._rounds.correction is not None or (self._rounds.mean and self._workers.size > 1):
                self._beginning = self._flat.vector.clone()
        self._apart = True

    @property
    def _part(self) -> float:
        """This worker's mean share of the global batches in the round."""
        return self._shares / self._steps if self._steps else 1.0

    def _mean(
        self, take: Callable[[ModelMean, float], Result], *, aside: int = 0, state: bool = False
    ) -> Tensor:
        """Return the mean of all models, followed by the means that the correction and the optimizer need.

        Args:
            take: function that computes the mean, given the weight of this worker's model.
            aside: see `Entry`.
            state: whether the further means are part of it.
        """

        def run(mean: ModelMean, number: int) -> Result:
            weight = self._weight * self._part
            vector, total, stop = take(mean, weight)
            if total == 0:  # all workers that began the round have failed: those that joined later count
                weight = self._part
                vector, total, stop = take(mean, weight)
            if vector is None:  # no model is finite; NaN makes that visible
                vector = torch.full_like(self._flat.vector, float("nan"))
            if state:
                means = (
                    self._mean_correction(mean, weight, total),
                    self._optimizer.mean_state(mean, weight, total),
                )
                more = [each for each in means if each is not None]
                vector = torch.cat([vector, *more]) if more else vector
            return Result(vector, total, stop)

        result = self.exchanger.exchange(run, aside=aside)
        self._received |= result.stop
        assert result.vector is not None, "some model has a weight"
        return result.vector

    def _mean_correction(self, mean: ModelMean, weight: float, total: float) -> Tensor | None:
        """Return the mean of the vectors that the correction averages; None where it averages none."""
        correction = self._rounds.correction
        if correction is None or not correction.averages:
            return None
        vector = correction.to_average()
        if total > 0:
            mean.average(vector, weight, total)
        return vector

    def _end_round(self) -> None:
        beginning, updated, stop = self._beginning, self._updated, self._stop_requested
        found = self._mean(lambda mean, weight: mean.at_end(beginning, updated, stop, weight), state=True)
        size = self._flat.size
        model, found = found[:size], found[size:]
        if self._rounds.correction is not None:
            average = None
            if self._rounds.correction.averages:
                average, found = found[:size], found[size:]
            self._rounds.correction.end_round(model, average, counts=self._weight > 0)
        self._flat.vector.copy_(model)
        if self._rounds.outer is not None:
            self._rounds.outer.step(self._flat.vector, self._rate)
        self._optimizer.models_averaged(found if len(found) else None)
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

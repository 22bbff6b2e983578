"""The worker part of all strategies that average models: rounds of local steps.

    worker 0   step step step step ┃ mean, outer rule ┃ step step …
    worker 1   step step step step ┃ mean, outer rule ┃ step step …
                                   └ all meet, and hear who wants to stop

When a run ends in the middle of a round, that round is over too.

A lost worker is missed at a meeting. Those who are left have all taken their steps, and meet again: the mean is theirs,
and what the lost one did in the round is gone. If the mean broke for some only, the others hand on what it came to.
A successor gets the newest worker's model, which counts once in the next mean and not twice.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.strategies.averaging.rounds.local_optimizer import LocalOptimizer
from polyrhythm.strategies.averaging.rounds.meeting_places import Agreed, MeetingPlaces
from polyrhythm.strategies.averaging.rounds.model_mean import Mean
from polyrhythm.strategies.averaging.rounds.outer import Outer
from polyrhythm.strategies.averaging.rounds.preconditioner import Preconditioner
from polyrhythm.strategies.averaging.rounds.rounds import Rounds
from polyrhythm.strategies.state import State
from polyrhythm.strategies.step import Step
from polyrhythm.strategies.worker_part import WorkerPart
from polyrhythm.strategies.worker_setting import WorkerSetting

_OPTIMIZER, _OUTER, _PRECONDITIONER = "optimizer.", "outer.", "preconditioner."
_NEVER = -1


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
        self._worker = setting.workers.rank
        members = tuple(range(setting.workers.size))
        self._places = MeetingPlaces(setting.workers, members, setting.flat, rounds)
        self._optimizer = LocalOptimizer(setting.plan, setting.flat, rounds.optimizer_state)
        self._apart = False
        self._weight = 1.0
        self._beginning: Tensor | None = None
        self._done = 0
        self._updated = _NEVER
        self._stop_requested = False
        self._heard = False
        self._rate = 0.0
        self._resumed: Tensor | None = None

    def start(self, step: int) -> int:
        """Takes worker 0's parameters, or those of its own that a checkpoint held."""
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
        """Updates this worker's own model, and averages where a round is over."""
        if self._updated != step.number:  # else only the meeting broke
            self._go_apart()
            self.update(step.weight, learning_rate)
            self._updated = step.number
        self._rate = learning_rate
        self._stop_requested |= step.stop
        if self._rounds.ends(step.number):
            self._end_round()
        elif self._places.meets_group(step.number):
            self._meet_group(step.number)
        self._done = step.number + 1
        return self._heard or (self._stop_requested and self._places.all.size == 1)

    def update(self, weight: float, learning_rate: float) -> None:
        """Takes a step with the flat gradients, unless they weigh nothing (an empty batch)."""
        self._rate = learning_rate
        if weight > 0:
            if self._rounds.preconditioner is not None:
                self._rounds.preconditioner.apply()
            self._optimizer.step(learning_rate)
            self.staleness[0] += 1

    def hear(self, stop: bool) -> None:
        """Notes whether all stop after a step that was none of a round."""
        self._heard |= stop

    def present(self) -> Tensor | None:
        """Gives the mean of all models as they are; in passing, all hear who wants to stop."""
        if not self._apart:
            return self._rounds.outer.model() if self._rounds.outer is not None else None
        return self._mean_of_all().vector if self._places.presents(self._done) else None

    def end(self) -> None:
        """Ends the round under way, and leaves the run's model in the flat vector, on all workers."""
        if self._apart:
            self._end_round()
        model = self._rounds.outer.model() if self._rounds.outer is not None else None
        if model is not None:
            self._flat.vector.copy_(model)

    def meetings(self, step: int) -> int:
        """Counts rounds, and the steps before the first."""
        return self._rounds.meetings(step)

    def regroup(self, workers: Communicator, members: tuple[int, ...]) -> None:
        """Meets others from now on. If all who began the round are lost, the models of those who came later count."""
        agreed = self._places.move(workers, members, Agreed(self._heard, self._weight))
        self._heard = agreed.stops
        if not agreed.counted:
            self._weight = 1.0

    @property
    def has_stopped(self) -> bool:
        """Whether it has heard so in a mean after which nobody has gone on; in a round, all stop a step later."""
        return self._heard and not self._apart

    def take_over(self, newest: State, done: int, step: int) -> int:
        """Begins as the newest is, or hears of the mean that it has missed, and goes on behind it."""
        if done < 0:
            self.load_state(newest)
            self._resumed, self._places.group_met = None, step - 1
            self._places.presented = step  # after so many steps it goes on, and is at no presentation
        else:
            self._take_missed_mean(newest, local=done >= self._rounds.first)
            step = done + 1
        self._done = step
        return step

    def state(self) -> State:
        """Gives this worker's own model and optimiser, and the outer rule's state."""
        tensors, facts = self._optimizer.state()
        named = {"vector": self._flat.vector} | _below(_OPTIMIZER, tensors)
        noted: dict[str, Any] = {"apart": self._apart, "rate": self._rate, "optimizer": facts}
        noted |= {"worker": self._worker, "weight": self._weight, "updated": self._updated}
        if self._apart and self._beginning is not None:
            named["beginning"] = self._beginning
        for prefix, rule in self._rules():
            tensors, noted[prefix] = rule.state()
            named |= _below(prefix, tensors)
        return named, noted

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave; another worker's steps will not count twice."""
        tensors, facts = state
        self._resumed = tensors["vector"]
        self._apart, self._rate, self._updated = facts["apart"], facts["rate"], facts["updated"]
        self._weight = facts["weight"] if facts["worker"] == self._worker or not self._apart else 0.0
        self._beginning = tensors["beginning"].clone() if "beginning" in tensors else None
        self._optimizer.load_state(_above(_OPTIMIZER, tensors), facts["optimizer"])
        for prefix, rule in self._rules():
            rule.load_state((_above(prefix, tensors), facts[prefix]))

    def model_in(self, state: State) -> Tensor | None:
        """Gives its own; none if that is another's."""
        tensors, facts = state
        return tensors["vector"] if facts["weight"] else None

    def _start_outer(self) -> None:
        if self._rounds.outer is not None:
            self._rounds.outer.start(self._flat.vector)

    def _rules(self) -> list[tuple[str, Outer | Preconditioner]]:
        """Gives the rules that remember something, with the prefix of their names."""
        rules = (_OUTER, self._rounds.outer), (_PRECONDITIONER, self._rounds.preconditioner)
        return [(prefix, rule) for prefix, rule in rules if rule is not None]

    def _go_apart(self) -> None:
        """Keeps what a round begins with for those who miss the mean before it."""
        if not self._apart and self._workers.size > 1:
            self._beginning = self._flat.vector.clone()
        self._apart = True

    def _mean_of_all(self) -> Mean:
        mean = self._places.all.take(self._stop_requested, self._weight)
        self._heard |= mean.stop_requested
        return mean

    def _end_round(self) -> None:
        mean = self._mean_of_all()
        state = self._optimizer.mean_state(self._places.all, self._weight, mean.weight)
        self._flat.vector.copy_(mean.vector)  # from here on nothing can break
        if self._rounds.outer is not None:
            self._rounds.outer.step(self._flat.vector, self._rate)
        self._optimizer.models_averaged(state)
        self._apart, self._weight, self._beginning = False, 1.0, None

    def _meet_group(self, step: int) -> None:
        assert self._places.group is not None, "a group that meets is there"
        mean = self._places.group.take(stop=False, weight=self._weight)
        self._flat.vector.copy_(mean.vector)
        if mean.weight > 0:
            self._weight = 1.0
        self._places.group_met = step

    def _take_missed_mean(self, newest: State, *, local: bool) -> None:
        """Takes the beginning of the newest worker's round, as it has the optimiser that all have, or keeps its own."""
        tensors, facts = newest
        if facts["apart"]:
            self._flat.vector.copy_(tensors["beginning"])
        of_optimizer = _above(_OPTIMIZER, tensors), facts["optimizer"]
        if local:
            self._optimizer.missed_average(*of_optimizer)
        else:
            self._optimizer.load_state(*of_optimizer)
        if self._rounds.outer is not None:
            self._rounds.outer.load_state((_above(_OUTER, tensors), facts[_OUTER]))
        self._apart, self._weight, self._beginning = False, 1.0, None


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _above(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

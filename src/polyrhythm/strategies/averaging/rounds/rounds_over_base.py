"""Rounds of another strategy's steps in place of local ones: its workers then begin anew at what the outer rule gives.

worker 0   step ⇄ step ⇄ step ┃ exact mean, outer rule ┃ step ⇄ step …
worker 1   step ⇄ step ⇄ step ┃ exact mean, outer rule ┃ step ⇄ step …      ⇄ what the base exchanges

Where a worker is lost, the base's workers begin anew in the middle of the round, whose beginning stays. If the mean at
its end broke for some only, the others hand on what the outer rule has made of it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.strategies.averaging.rounds.outer import Outer
from polyrhythm.strategies.averaging.rounds.rounds import every
from polyrhythm.strategies.state import State
from polyrhythm.strategies.step import Step
from polyrhythm.strategies.worker_part import WorkerPart
from polyrhythm.training.flat_parameters import FlatParameters

_OUTER = "outer."


class RoundsOverBase(WorkerPart):
    """Takes the base's steps, and ends a round as all others do.

    Args:
        base: the base's part of this worker, which can begin anew.
        flat: of this worker.
        steps: of a round.
        outer: what is made of the mean.
    """

    def __init__(self, base: WorkerPart, flat: FlatParameters, steps: int, outer: Outer) -> None:
        super().__init__()
        self._base = base
        self._flat = flat
        self._steps = steps
        self._ends = every(steps)
        self._outer = outer
        self._apart = False
        self._rate = 0.0
        self._resumed = False
        self.staleness = base.staleness

    def start(self, step: int) -> int:
        """Starts the base, and the first round where it does."""
        if not self._resumed:
            self._outer.start(self._flat.vector)  # worker 0's, before anything can break
        step = self._base.start(step)
        if not self._resumed:
            self._outer.start(self._flat.vector)
        return step

    def begin(self, step: Step) -> None:
        """Begins a step of the base."""
        self._base.begin(step)

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Takes a step of the base, and ends the round if it is over."""
        stop = self._base.gradients_ready(step, learning_rate)
        self._apart, self._rate = True, learning_rate
        if self._ends(step.number):
            self._base.settle()
            mean = self._base.common_model()
            self._outer.step(mean, learning_rate)
            self._base.begin_at(mean)
            self._apart = False
        return stop

    def settle(self) -> None:
        """Settles the base."""
        self._base.settle()

    def present(self) -> Tensor | None:
        """Gives the mean of all models as they are."""
        return self._base.present()

    def end(self) -> None:
        """Ends the base, and the round under way."""
        self._base.end()
        if self._apart:
            self._outer.step(self._flat.vector, self._rate)
            self._apart = False

    def break_off(self) -> None:
        """Lets the base break off."""
        self._base.break_off()

    def regroup(self, workers: Communicator, members: tuple[int, ...]) -> None:
        """Lets the base begin anew with others, in the middle of the round."""
        self._base.regroup(workers, members)

    def meetings(self, step: int) -> int:
        """Counts rounds."""
        return step // self._steps

    def exchanges(self, step: int) -> int:
        """As the base."""
        return self._base.exchanges(step)

    def lets_in(self, step: int) -> bool:
        """As the base."""
        return self._base.lets_in(step)

    @property
    def has_stopped(self) -> bool:
        """As the base."""
        return self._base.has_stopped

    def take_over(self, newest: State, done: int, step: int) -> int:
        """Begins as the newest is, or takes the round's end that it has missed."""
        base, (outer, facts) = self._parts(newest)
        self._outer.load_state(outer)
        self._apart, self._rate = facts["apart"], facts["rate"]
        return self._base.take_over(base, done, step)

    def state(self) -> State:
        """Gives the base's state, and the outer rule's."""
        tensors, facts = self._base.state()
        outer, outer_facts = self._outer.state()
        named = {_OUTER + name: value for name, value in outer.items()}
        return tensors | named, {
            "base": facts,
            "outer": outer_facts,
            "apart": self._apart,
            "rate": self._rate,
        }

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave."""
        base, (outer, facts) = self._parts(state)
        self._outer.load_state(outer)
        self._base.load_state(base)
        self._apart, self._rate, self._resumed = facts["apart"], facts["rate"], True

    def model_in(self, state: State) -> Tensor | None:
        """Gives the base's."""
        return self._base.model_in(self._parts(state)[0])

    @staticmethod
    def _parts(state: State) -> tuple[State, tuple[State, dict[str, Any]]]:
        """Takes a state apart: that of the base, that of the outer rule, and all facts."""
        tensors, facts = state
        outer = {
            name.removeprefix(_OUTER): value for name, value in tensors.items() if name.startswith(_OUTER)
        }
        base = {name: value for name, value in tensors.items() if not name.startswith(_OUTER)}
        return (base, facts["base"]), ((outer, facts["outer"]), facts)

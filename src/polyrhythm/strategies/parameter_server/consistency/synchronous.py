"""Synchronous: an update is the mean of one gradient of every pusher, and nobody goes on before it.

Gradients are summed in the order of the pushers, not in that of their arrival, so the result does not depend on timing.

Where a worker is lost, an update is the mean of the gradients of those who are left, and a gradient that the lost one
had already pushed counts as well. Its successor enters at the same round on all servers. It takes the steps that were
left to the lost worker, one per update, and so stays behind the others. If a server already has a step that another
server lacks, it takes the repeated push for an empty batch.
"""

from __future__ import annotations

from typing import Any

from polyrhythm.strategies.parameter_server.serving.gate import Consistency, Decision, Gate
from polyrhythm.strategies.parameter_server.serving.membership import Rounds


class Synchronous(Consistency):
    """All wait for all."""

    def in_step(self) -> bool:
        """Always."""
        return True

    def gathers(self, pushers: int) -> int:
        """One of everybody."""
        return pushers

    def spares(self, pushers: int) -> int:
        """All: an update is the mean of those who are there."""
        return pushers

    def gate(self, pushers: int) -> Gate:
        """Makes one server's gate."""
        return SynchronousGate(pushers)


class SynchronousGate(Gate):
    """Holds gradients until there is one of everybody who is there; what a lost one had pushed goes with them.

    Args:
        pushers: how many there are.

    Attributes:
        rounds: of which each is an update, and those who are to come in.
    """

    rounds: Rounds

    def __init__(self, pushers: int) -> None:
        self.rounds = Rounds(pushers)
        self._present = set(range(pushers))
        self._held: set[int] = set()
        self._orphans: list[int] = []
        """Lost pushers of whom a gradient is held, which will not be answered."""

    def ask(self, pusher: int, step: int) -> Decision:
        """Answers."""
        return Decision(answer=(pusher,))

    def arrive(self, pusher: int, step: int) -> Decision:
        """Holds the gradient, or applies all if it was the last."""
        self.rounds.take(pusher, step)
        self._held.add(pusher)
        return self._decide()

    def leave(self, pusher: int) -> Decision:
        """Stops waiting for a pusher."""
        self.rounds.forget(pusher)
        self._present.discard(pusher)
        if pusher in self._held:
            self._held.discard(pusher)
            self._orphans.append(pusher)
        return self._decide()

    def join(self, pusher: int) -> None:
        """Ends no round until this pusher has said at which it comes in."""
        self.rounds.invite(pusher, later=pusher in self._orphans)

    def enter(self, pusher: int, number: int) -> Decision:
        """Goes on to that round without it, and answers it then."""
        self.rounds.accept(pusher, number)
        return self._decide()

    def state(self) -> dict[str, Any]:
        """Nothing: what is held will come again."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes nothing; in older checkpoints, of whom a gradient is held that will not come again."""
        self._orphans = list(state.get("orphans", ()))

    def _decide(self) -> Decision:
        if self.rounds.held_up:
            return Decision()
        entered = self._let_in()
        if not (self._held or self._orphans) or not self._held >= self._present:
            return Decision(answer=entered)
        answer = tuple(sorted(self._held))
        apply = tuple(sorted([*answer, *self._orphans]))
        self.rounds.number += bool(answer)
        self._held, self._orphans = set(), []
        return Decision(apply=apply, answer=tuple(sorted(answer + self._let_in())))

    def _let_in(self) -> tuple[int, ...]:
        alone = not (self._present or self._orphans)
        entered = self.rounds.let_in(alone=alone)
        self._present.update(entered)
        return tuple(entered)

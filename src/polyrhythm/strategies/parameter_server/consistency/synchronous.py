"""Synchronous: an update is the mean of one gradient of every pusher, and nobody goes on before it.

Gradients are summed in the pushers' order, not in that of their arrival, so the result does not depend on timing. Where
a worker is lost, an update is the mean of those that are left; what it had pushed goes into the next. Its successor
takes the steps that were left to it, one an update, and so stays behind the others.
"""

from __future__ import annotations

from typing import Any

from polyrhythm.strategies.parameter_server.serving.gate import Consistency, Decision, Gate


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


class SynchronousGate:
    """Holds gradients until there is one of everybody who is there; what a lost one had pushed goes with them."""

    def __init__(self, pushers: int) -> None:
        self._present = set(range(pushers))
        self._held: set[int] = set()
        self._orphans: list[int] = []
        """Lost pushers of whom a gradient is held, which will not be answered."""
        self._replaced: set[int] = set()
        """Those of them whose successor goes on after it."""

    def ask(self, pusher: int, step: int) -> Decision:
        """Answers."""
        self._replaced.update({pusher} & set(self._orphans))
        return Decision(answer=(pusher,))

    def arrive(self, pusher: int, step: int) -> Decision:
        """Holds the gradient, or applies all if it was the last."""
        self._held.add(pusher)
        return self._decide()

    def leave(self, pusher: int) -> Decision:
        """Stops waiting for a pusher."""
        self._present.discard(pusher)
        if pusher in self._held:
            self._held.discard(pusher)
            self._orphans.append(pusher)
        return self._decide()

    def join(self, pusher: int) -> None:
        """Waits for a pusher again."""
        self._present.add(pusher)

    def state(self) -> dict[str, Any]:
        """Of whom a gradient is held that will not come again; all others that are held will."""
        return {"orphans": [pusher for pusher in self._orphans if pusher in self._replaced]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` gave."""
        self._orphans = list(state.get("orphans", ()))  # older checkpoints had none
        self._replaced = set(self._orphans)

    def _decide(self) -> Decision:
        if not (self._held or self._orphans) or not self._held >= self._present:
            return Decision()
        answer = tuple(sorted(self._held))
        apply = tuple(sorted([*answer, *self._orphans]))
        self._held, self._orphans, self._replaced = set(), [], set()
        return Decision(apply=apply, answer=answer)

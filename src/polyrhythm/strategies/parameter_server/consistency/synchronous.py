"""Synchronous: an update is the mean of one gradient of every pusher, and nobody goes on before it.

Gradients are summed in the pushers' order, not in that of their arrival, so the result does not depend on timing.
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
        """None."""
        return 0

    def gate(self, pushers: int) -> Gate:
        """Makes one server's gate."""
        return SynchronousGate(pushers)


class SynchronousGate:
    """Holds gradients until there is one of everybody."""

    def __init__(self, pushers: int) -> None:
        self._present = set(range(pushers))
        self._held: set[int] = set()

    def ask(self, pusher: int, step: int) -> Decision:
        """Answers."""
        return Decision(answer=(pusher,))

    def arrive(self, pusher: int, step: int) -> Decision:
        """Holds the gradient, or applies all if it was the last."""
        self._held.add(pusher)
        return self._decide()

    def leave(self, pusher: int) -> Decision:
        """Stops waiting for a pusher."""
        self._present.discard(pusher)
        return self._decide()

    def join(self, pusher: int) -> None:
        """Waits for a pusher again."""
        self._present.add(pusher)

    def state(self) -> dict[str, Any]:
        """Nothing: between steps, nothing is held."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes nothing."""

    def _decide(self) -> Decision:
        if not self._held or not self._held >= self._present:
            return Decision()
        everyone = tuple(sorted(self._held))
        self._held = set()
        return Decision(apply=everyone, answer=everyone)

"""Asynchronous: every gradient is an update as soon as it arrives, and its pusher is answered at once.

With workers of equal speed, the mean staleness is N-1.
"""

from __future__ import annotations

from typing import Any

from polyrhythm.strategies.parameter_server.serving.gate import (
    Consistency,
    Decision,
    Gate,
    let_through,
)


class Asynchronous(Consistency):
    """Nobody waits for anybody."""

    def in_step(self) -> bool:
        """Never."""
        return False

    def waits_for_slower(self) -> bool:
        """Never."""
        return False

    def gathers(self, pushers: int) -> int:
        """One."""
        return 1

    def spares(self, pushers: int) -> int:
        """All."""
        return pushers

    def gate(self, pushers: int) -> Gate:
        """Makes one server's gate."""
        return AsynchronousGate()


class AsynchronousGate(Gate):
    """Lets everything through."""

    def ask(self, pusher: int, step: int) -> Decision:
        """Answers."""
        return Decision(answer=(pusher,))

    def arrive(self, pusher: int, step: int) -> Decision:
        """Applies it and answers."""
        return let_through(pusher)

    def leave(self, pusher: int) -> Decision:
        """Changes nothing."""
        return Decision()

    def join(self, pusher: int) -> None:
        """Changes nothing."""

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes nothing."""

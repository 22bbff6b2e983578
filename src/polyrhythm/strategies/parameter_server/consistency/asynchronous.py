"""Asynchronous: every gradient is an update as soon as it arrives, and its pusher is answered at once.

With workers of equal speed, the mean staleness is N-1.
"""

from __future__ import annotations

from polyrhythm.strategies.parameter_server.serving.gate import (
    Consistency,
    Gate,
)


class Asynchronous(Consistency):
    """No pusher waits for another."""

    def in_step(self) -> bool:
        return False

    def waits_for_slower(self) -> bool:
        return False

    def gathers(self, pushers: int) -> int:
        return 1

    def spares(self, pushers: int) -> int:
        return pushers

    def gate(self, pushers: int) -> Gate:
        return Gate()

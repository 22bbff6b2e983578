"""Meetings: what holds only after some steps, such as those that end with a mean of all models."""

from __future__ import annotations

from collections.abc import Callable

from polyrhythm.strategies.invariant import Invariant, Stepped


class Meetings(Invariant):
    """Lets another invariant see only the steps after which workers have met.

    Args:
        inner: the other invariant, which looks at steps.
        meet: tells, from a step's number, whether they have.
    """

    def __init__(self, inner: Invariant, meet: Callable[[int], bool]) -> None:
        self._inner = inner
        self._meet = meet

    def stepped(self, event: Stepped) -> None:
        """Passes it on, if they have met."""
        if self._meet(event.step):
            self._inner.stepped(event)

"""Meetings: what holds only after some steps, such as those that end with a mean of all models."""

from __future__ import annotations

from collections.abc import Callable

from polyrhythm.strategies.invariant import Handled, Invariant, Stepped


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


class Undisturbed(Invariant):
    """Lets another invariant see only what happens before workers regroup for the first time, or servers lose one.

    Args:
        inner: the other invariant, which looks at steps, and at servers.
    """

    def __init__(self, inner: Invariant) -> None:
        self._inner = inner
        self._over = False

    def handled(self, event: Handled) -> None:
        """Passes it on, if no server has heard of a loss."""
        self._over |= event.message is None
        if not self._over:
            self._inner.handled(event)

    def stepped(self, event: Stepped) -> None:
        """Passes it on, if nobody has regrouped."""
        self._over |= event.regrouped is not None
        if not self._over:
            self._inner.stepped(event)

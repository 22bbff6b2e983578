"""Gathered: every update is made of exactly so many gradients."""

from __future__ import annotations

from polyrhythm.strategies.invariant import Handled, Invariant, Violation


class Gathered(Invariant):
    """Counts the gradients of every update.

    Args:
        count: that it must be.
        drops: whether late gradients are dropped, so that what is applied is fresh.
        leftover: whether the last update may have fewer.
    """

    def __init__(self, count: int, *, drops: bool = False, leftover: bool = False) -> None:
        self._count = count
        self._drops = drops
        self._leftover = leftover
        self._short: set[int] = set()

    def handled(self, event: Handled) -> None:
        """Looks at an update."""
        if event.version == event.version_before:
            return
        found = sum(event.applied.values())
        if (
            event.server in self._short
            or (found != self._count and not self._leftover)
            or found > self._count
        ):
            raise Violation(
                "gradients of an update",
                rank=event.server,
                time_s=event.time_s,
                expected=self._count,
                found=f"{found}, after a shorter one" if event.server in self._short else found,
            )
        if found < self._count:
            self._short.add(event.server)
        if self._drops and set(event.applied) != {0}:
            raise Violation(
                "staleness where late gradients are dropped",
                rank=event.server,
                time_s=event.time_s,
                expected={0: found},
                found=dict(event.applied),
            )

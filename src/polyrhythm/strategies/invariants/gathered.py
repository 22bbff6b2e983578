"""Gathered: every update is made of exactly so many gradients."""

from __future__ import annotations

from polyrhythm.communication.message import Kind
from polyrhythm.strategies.invariant import Handled, Invariant, Violation


class Gathered(Invariant):
    """Counts the gradients of every update.

    Args:
        count: that it must be.
        drops: whether late gradients are dropped, so that what is applied is fresh.
        leftover: whether an update may have fewer when somebody leaves or is lost, who may have been the last there.
    """

    def __init__(self, count: int, *, drops: bool = False, leftover: bool = False) -> None:
        self._count = count
        self._drops = drops
        self._leftover = leftover

    def handled(self, event: Handled) -> None:
        """Looks at an update."""
        if event.version == event.version_before:
            return
        found = sum(event.applied.values())
        parting = event.message is None or event.message.kind is Kind.LEAVE
        if found > self._count or (found < self._count and not (self._leftover and parting)):
            raise Violation(
                "gradients of an update",
                rank=event.server,
                time_s=event.time_s,
                expected=self._count,
                found=found,
            )
        if self._drops and set(event.applied) != {0}:
            raise Violation(
                "staleness where late gradients are dropped",
                rank=event.server,
                time_s=event.time_s,
                expected={0: found},
                found=dict(event.applied),
            )

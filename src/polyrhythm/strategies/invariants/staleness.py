"""Staleness: what servers count is version at apply minus version at the pusher's last read, for every gradient."""

from __future__ import annotations

from collections import Counter

from polyrhythm.communication.message import Kind
from polyrhythm.strategies.invariant import Delivered, Handled, Invariant, Violation
from polyrhythm.strategies.invariants.pushes import Pushes


class Staleness(Invariant):
    """Staleness as counted is staleness as the messages show it."""

    def __init__(self) -> None:
        self._read: dict[tuple[int, int], int] = {}
        self._pushes = Pushes()

    def delivered(self, event: Delivered) -> None:
        """A worker has read what it was answered with."""
        if event.message.kind is Kind.PARAMETERS:
            self._read[event.source, event.to] = event.message.version

    def handled(self, event: Handled) -> None:
        """Counts what is applied now."""
        applied = self._pushes.follow(event)
        expected = Counter(
            event.version_before - self._read.get((event.server, push.source), 0)
            for push in applied
            if push.message.weight > 0
        )
        if expected != event.applied:
            raise Violation(
                "staleness of the gradients that an update takes",
                rank=event.server,
                time_s=event.time_s,
                expected=dict(expected),
                found=dict(event.applied),
            )

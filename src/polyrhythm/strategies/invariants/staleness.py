"""Staleness: what servers count is version at apply minus version at the pusher's last read, for every gradient."""

from __future__ import annotations

from collections import Counter, defaultdict

from polyrhythm.communication.message import Kind
from polyrhythm.strategies.invariant import Delivered, Handled, Invariant, Violation
from polyrhythm.strategies.invariants.pushes import Pushes


class Staleness(Invariant):
    """Staleness as counted is staleness as the messages show it.

    Args:
        drops: whether late gradients are dropped.
        doubts: whether servers drop what a lost pusher had pushed unless all have it.
    """

    def __init__(self, *, drops: bool = False, doubts: bool = False) -> None:
        self._read: dict[tuple[int, int], int] = {}
        self._read_before: defaultdict[int, dict[tuple[int, int], int]] = defaultdict(dict)
        """For a server: what was read before a gradient that is held, by its rank and step."""
        self._pushes = Pushes(drops=drops, doubts=doubts)
        self._drops = drops

    def delivered(self, event: Delivered) -> None:
        """A worker has read what it was answered with."""
        if event.message.kind is Kind.PARAMETERS:
            self._read[event.source, event.to] = event.message.version

    def handled(self, event: Handled) -> None:
        """Counts what is applied now."""
        message, before = event.message, self._read_before[event.server]
        if message is not None and message.kind is Kind.PUSH:
            read = self._read.get((event.server, event.source), 0)
            before.setdefault((event.source, message.step), read)  # it may come again while it is held
        elif message is None and self._drops:
            for key in [key for key in before if key[0] == event.source]:
                del before[key]
        applied = self._pushes.follow(event)
        expected, doubtful = Counter[int](), Counter[int]()
        for push in applied:
            if push.message.weight > 0:
                age = event.version_before - before[push.source, push.message.step]
                (doubtful if push.doubtful else expected)[age] += 1
        if event.version != event.version_before:
            before.clear()
        if not expected <= event.applied <= expected + doubtful:
            raise Violation(
                "staleness of the gradients that an update takes",
                rank=event.server,
                time_s=event.time_s,
                expected=dict(expected),
                found=dict(event.applied),
            )

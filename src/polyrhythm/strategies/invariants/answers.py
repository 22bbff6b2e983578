"""Answers: a worker gets as many answers as it has asked for, and no successor gets one to its predecessor."""

from __future__ import annotations

from collections import Counter

from polyrhythm.communication.message import Kind
from polyrhythm.strategies.invariant import Delivered, Invariant, Violation
from polyrhythm.strategies.role_assignment import RoleAssignment

_ASKING = (Kind.PULL, Kind.PUSH, Kind.FETCH)


class Answers(Invariant):
    """Every answer goes to the incarnation that asked.

    Args:
        cast: who does what.
        asking: kinds of message that are answered with parameters.
    """

    def __init__(self, cast: RoleAssignment, asking: tuple[Kind, ...] = _ASKING) -> None:
        self._asking = asking
        self._servers = frozenset(cast.servers)
        self._open: Counter[tuple[int, int, int]] = Counter()

    def delivered(self, event: Delivered) -> None:
        """Counts questions and answers of an incarnation."""
        if event.to in self._servers and event.message.kind in self._asking:
            self._open[event.to, event.source, event.source_incarnation] += 1
        elif event.source in self._servers and event.message.kind is Kind.PARAMETERS:
            key = event.source, event.to, event.to_incarnation
            self._open[key] -= 1
            if self._open[key] < 0:
                raise Violation(
                    f"an answer of rank {event.source} to a question of another, or of nobody",
                    rank=event.to,
                    time_s=event.time_s,
                    expected=f"none for incarnation {event.to_incarnation}, which has no open question",
                    found=f"one of version {event.message.version}, step {event.message.step}",
                )

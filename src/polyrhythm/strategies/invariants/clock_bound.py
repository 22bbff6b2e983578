"""Clock bound: nobody goes on more than s steps ahead of the slowest, nor with a copy that lacks older updates."""

from __future__ import annotations

from collections.abc import Collection

from polyrhythm.communication.message import Kind
from polyrhythm.strategies.invariant import Handled, Invariant, Violation
from polyrhythm.strategies.role_assignment import RoleAssignment


class ClockBound(Invariant):
    """Keeps every pusher's clock on every server, from the messages alone.

    A lost pusher counts for nothing until its successor pushes; that one's clock begins at the slowest of those that
    are there, if the other fell before that, and while it catches up it
    does not pass the first of those who never were behind. Where nobody is left of them, all clocks go back alike.

    Args:
        cast: who does what.
        pushers: the ranks that push.
        s: the bound.
        cached: whether answers may be empty.
    """

    def __init__(
        self, cast: RoleAssignment, pushers: Collection[int], s: int, *, cached: bool = False
    ) -> None:
        self._s = s
        self._cached = cached
        self._clocks = {server: dict.fromkeys(pushers, 0) for server in cast.servers}
        self._gone: dict[int, set[int]] = {server: set() for server in cast.servers}
        self._credits = {server: dict.fromkeys(pushers, 0) for server in cast.servers}
        self._pushed = {server: dict.fromkeys(pushers, 0) for server in cast.servers}
        """Steps that have come; a successor may repeat the last."""
        self._copies: dict[tuple[int, int], int] = {}

    def handled(self, event: Handled) -> None:
        """Moves the sender's clock, then looks at everyone who may go on."""
        clocks, gone = self._clocks[event.server], self._gone[event.server]
        if event.message is None or event.message.kind is Kind.LEAVE:
            self._lose(event.server, event.source)
        elif (
            event.message.kind is Kind.PUSH and event.message.step >= self._pushed[event.server][event.source]
        ):
            self._pushed[event.server][event.source] = event.message.step + 1
            if event.source in gone:
                self._let_in(event.server, event.source, event.message.step + 1)
            self._move(event.server, event.source, event.message.step + 1)
        present = [clock for pusher, clock in clocks.items() if pusher not in gone]
        for to, reply in event.replies:
            if to not in clocks or reply.kind is not Kind.PARAMETERS:
                continue
            if to not in gone:
                self._check(event, to, min(present), fresh=reply.tensor is not None)
            elif reply.tensor is not None:  # a successor's first copy
                self._copies[event.server, to] = min(present, default=clocks[to])

    def _lose(self, server: int, pusher: int) -> None:
        """Shifts all clocks that are left alike, if none of them is the count of its pusher's steps."""
        gone, credits = self._gone[server], self._credits[server]
        gone.add(pusher)
        left = [other for other in credits if other not in gone]
        least = min((credits[other] for other in left), default=0)
        for other in left:
            credits[other] -= least
            self._clocks[server][other] -= least
            self._copies[server, other] = self._copies.get((server, other), -1) - least

    def _let_in(self, server: int, pusher: int, steps: int) -> None:
        clocks, gone = self._clocks[server], self._gone[server]
        slowest = min((clocks[other] for other in clocks if other not in gone), default=0)
        self._credits[server][pusher] = max(0, slowest - steps)
        gone.discard(pusher)

    def _move(self, server: int, pusher: int, steps: int) -> None:
        clocks, credits, gone = self._clocks[server], self._credits[server], self._gone[server]
        if credits[pusher]:
            first = max(clocks[other] for other in clocks if other not in gone and not credits[other])
            credits[pusher] = max(0, min(credits[pusher], first - steps))
        clocks[pusher] = steps + credits[pusher]

    def _check(self, event: Handled, to: int, slowest: int, *, fresh: bool) -> None:
        clock = self._clocks[event.server][to]
        if clock - self._s > slowest:
            raise Violation(
                f"the step with which rank {to} may go on",
                rank=event.server,
                time_s=event.time_s,
                expected=f"at most {slowest + self._s}, the slowest being at {slowest}",
                found=clock,
            )
        if fresh:
            self._copies[event.server, to] = slowest
        elif not self._cached or self._copies.get((event.server, to), -1) < clock - self._s:
            raise Violation(
                f"the copy with which rank {to} may begin step {clock}",
                rank=event.server,
                time_s=event.time_s,
                expected=f"all updates of the steps before {clock - self._s}",
                found=f"those before {self._copies.get((event.server, to), -1)}",
            )

"""Batches: every portion that was pushed is in exactly one batch, and a batch has what all workers have pushed."""

from __future__ import annotations

from collections import Counter

from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.cast import Cast
from polyrhythm.strategies.invariant import Handled, Invariant, Violation


class Batches(Invariant):
    """Keeps every server's batch under way, from the messages alone.

    Args:
        cast: who does what.
    """

    def __init__(self, cast: Cast) -> None:
        self._workers = frozenset(cast.workers)
        self._steps: Counter[tuple[int, int]] = Counter()
        self._held: dict[int, dict[int, Message]] = {server: {} for server in cast.servers}
        self._gone: dict[int, set[int]] = {server: set() for server in cast.servers}

    def handled(self, event: Handled) -> None:
        """Notes what is pushed, and looks at a batch that is over."""
        server, message = event.server, event.message
        held, gone = self._held[server], self._gone[server]
        if message is None or message.kind is Kind.LEAVE:
            gone.add(event.source)
        elif message.kind is Kind.PUSH and message.step >= self._steps[server, event.source]:
            held[event.source] = message
        over = {to for to, reply in event.replies if to in held and reply.kind is Kind.PARAMETERS}
        if over or event.version != event.version_before:
            self._check(event, over, held, self._workers - gone)
        for to, reply in event.replies:
            if reply.kind is Kind.PARAMETERS:
                self._steps[server, to] = reply.step
                held.pop(to, None)

    def _check(self, event: Handled, over: set[int], held: dict[int, Message], there: frozenset[int]) -> None:
        portions = sum(
            message.step + 1 - self._steps[event.server, rank]
            for rank, message in held.items()
            if message.weight > 0
        )
        updates, applied = event.version - event.version_before, +event.applied
        expected = (int(portions > 0), Counter({0: portions} if portions else {}))
        if not over >= there or over != held.keys() or (updates, applied) != expected:
            raise Violation(
                "a batch that is over",
                rank=event.server,
                time_s=event.time_s,
                expected=f"{portions} fresh portions, of ranks {sorted(there | held.keys())}",
                found=f"{updates} updates of {dict(applied)}, ranks {sorted(over)}",
            )

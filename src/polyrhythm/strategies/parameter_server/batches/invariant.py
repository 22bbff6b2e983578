"""Batches: every portion that was pushed is in exactly one batch, and a batch has what all workers have pushed."""

from __future__ import annotations

from collections import Counter

from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.invariant import Handled, Invariant, Violation
from polyrhythm.strategies.role_assignment import RoleAssignment


class Batches(Invariant):
    """Keeps every server's batch under way, from the messages alone.

    Args:
        cast: who does what.
    """

    def __init__(self, cast: RoleAssignment) -> None:
        self._workers = frozenset(cast.workers)
        self._steps: Counter[tuple[int, int]] = Counter()
        self._held: dict[int, dict[int, Message]] = {server: {} for server in cast.servers}
        self._gone: dict[int, set[int]] = {server: set() for server in cast.servers}

    def handled(self, event: Handled) -> None:
        """Notes what is pushed, and looks at a batch that is over."""
        server, message = event.server, event.message
        held, gone = self._held[server], self._gone[server]
        answered = {to: reply for to, reply in event.replies if reply.kind is Kind.PARAMETERS}
        if message is None or message.kind is Kind.LEAVE:
            gone.add(event.source)
        elif message.kind is Kind.PUSH and message.step >= self._steps[server, event.source]:
            held[event.source] = message
        over = {rank for rank in held.keys() - gone if rank in answered}
        if over or event.version != event.version_before:
            self._check(event, over, held, gone)
            held.clear()
        for to, reply in answered.items():
            self._steps[server, to] = reply.step
            held.pop(to, None)
            gone.discard(to)  # a successor begins

    def _check(self, event: Handled, over: set[int], held: dict[int, Message], gone: set[int]) -> None:
        portions, of_lost = Counter[int](), Counter[int]()
        for rank, message in held.items():
            if message.weight > 0:
                portion = message.step + 1 - self._steps[event.server, rank]
                (of_lost if rank in gone else portions)[0] += portion
        there = self._workers - gone
        updates, applied = event.version - event.version_before, +event.applied
        fits = +portions <= applied <= portions + of_lost and updates == bool(applied)
        if over != there or over != held.keys() - gone or not fits:
            raise Violation(
                "a batch that is over",
                rank=event.server,
                time_s=event.time_s,
                expected=f"{portions[0]} fresh portions, of ranks {sorted(there | held.keys())}",
                found=f"{updates} updates of {dict(applied)}, ranks {sorted(over)}",
            )

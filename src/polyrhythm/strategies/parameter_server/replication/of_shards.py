"""Invariants of shards that are on two servers: they see every shard as one server, whoever has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from polyrhythm.communication.message import Kind
from polyrhythm.strategies.invariant import Delivered, Ended, Handled, Invariant, Stepped
from polyrhythm.strategies.parameter_server.replication.replicated_server import KEPT
from polyrhythm.strategies.role_assignment import RoleAssignment


class OfShards(Invariant):
    """Tells others what happens to a shard under the rank of the server whose own it is.

    Args:
        cast: who does what.
        told: the invariants.
    """

    def __init__(self, cast: RoleAssignment, told: Sequence[Invariant]) -> None:
        self._workers = frozenset(cast.workers)
        self._told = told
        self._servers = cast.servers
        self._before = {rank: cast.servers[index - 1] for index, rank in enumerate(cast.servers)}
        self._relays: dict[tuple[int, int, int], int] = {}

    def delivered(self, event: Delivered) -> None:
        """Passes on what travels between workers and shards, and not what servers tell each other, or whom to ask."""
        source, to, message = event.source, event.to, event.message
        link = source, event.source_incarnation, to
        if to in self._before and message.kind is Kind.RELAY:
            if source in self._workers:
                self._relays[link] = self._servers[message.version]
            return
        if source in self._before and (to in self._before or message.kind in (Kind.RELAY, Kind.JOIN)):
            return
        if link in self._relays:
            event = replace(event, to=self._relays.pop(link))
        elif source in self._before and message.tag == KEPT:
            event = replace(event, source=self._before[source])
        for entry in self._told:
            entry.delivered(event)

    def handled(self, event: Handled) -> None:
        """Passes it on: it is of a shard already."""
        for entry in self._told:
            entry.handled(event)

    def stepped(self, event: Stepped) -> None:
        """Passes it on."""
        for entry in self._told:
            entry.stepped(event)

    def ended(self, event: Ended) -> None:
        """Passes it on."""
        for entry in self._told:
            entry.ended(event)

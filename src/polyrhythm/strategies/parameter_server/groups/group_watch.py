"""Groups as pushers: what watches ranks that push watches groups, whoever of a group speaks for it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.invariant import Delivered, Ended, Handled, Invariant, Regrouped, Stepped
from polyrhythm.strategies.role_assignment import RoleAssignment

_NO_NEWS = Message(Kind.BROKEN)


class OfMembers(Invariant):
    """Lets another invariant see the steps of some workers only.

    Args:
        inner: the other invariant.
        ranks: of the workers.
    """

    def __init__(self, inner: Invariant, ranks: Collection[int]) -> None:
        self._inner = inner
        self._ranks = ranks

    def stepped(self, event: Stepped) -> None:
        """Passes it on, if it is one of theirs."""
        if event.rank in self._ranks:
            self._inner.stepped(event)

    def regrouped(self, event: Regrouped) -> None:
        """Passes it on, if it is one of theirs."""
        if event.rank in self._ranks:
            self._inner.regrouped(event)

    def ended(self, event: Ended) -> None:
        """Passes on which of them are there."""
        there = tuple(rank for rank in event.survivors if rank in self._ranks)
        if there:
            self._inner.ended(replace(event, survivors=there))


class OfGroups(Invariant):
    """Lets another invariant take a group for a pusher, by the rank of its first member.

    Only the loss of who speaks for a group is one of the pusher; a group counts as there if anybody of it is.

    Args:
        inner: the other invariant.
        cast: who does what.
        groups: ranks of the members of each.
    """

    def __init__(self, inner: Invariant, cast: RoleAssignment, groups: Sequence[tuple[int, ...]]) -> None:
        self._inner = inner
        self._name_of = {rank: ranks[0] for ranks in groups for rank in ranks}
        self._speaks: dict[tuple[int, int], int | None] = {
            (server, ranks[0]): ranks[0] for ranks in groups for server in cast.servers
        }
        self._speaks_next: dict[tuple[int, int], int] = {}

    def delivered(self, event: Delivered) -> None:
        """Passes it on, in the names of groups."""
        source, to = self._named(event.source), self._named(event.to)
        self._inner.delivered(replace(event, source=source, to=to))

    def handled(self, event: Handled) -> None:
        """Passes it on, in the names of groups."""
        name, message = self._named(event.source), event.message
        key = event.server, name
        speaker = self._speaks.get(key)
        if message is None and speaker != event.source:
            message = _NO_NEWS
        elif message is None:
            self._speaks[key] = self._speaks_next.pop(key, None)
        elif message.kind is Kind.PULL and speaker is None:
            self._speaks[key] = event.source
        elif message.kind is Kind.PULL and speaker != event.source:
            self._speaks_next[key] = event.source
        replies = [(self._named(to), reply) for to, reply in event.replies]
        self._inner.handled(replace(event, source=name, message=message, replies=replies))

    def stepped(self, event: Stepped) -> None:
        """Passes it on."""
        self._inner.stepped(event)

    def regrouped(self, event: Regrouped) -> None:
        """Passes it on."""
        self._inner.regrouped(event)

    def ended(self, event: Ended) -> None:
        """Passes on which groups are there."""
        there = tuple(sorted({self._named(rank) for rank in event.survivors}))
        self._inner.ended(replace(event, survivors=there, incarnations={}))

    def _named(self, rank: int) -> int:
        return self._name_of.get(rank, rank)


class Means(Invariant):
    """Notes whose gradients are in what a group pushes; finds nothing wrong itself.

    Args:
        cast: who does what.
        groups: ranks of the members of each.
        drops: whether a gradient may be dropped, and come again.
    """

    def __init__(self, cast: RoleAssignment, groups: Sequence[tuple[int, ...]], *, drops: bool) -> None:
        self._indices = {rank: index for index, rank in enumerate(cast.workers)}
        self._name_of = {rank: ranks[0] for ranks in groups for rank in ranks}
        self._there = {rank: ranks for ranks in groups for rank in ranks}
        self._behind: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._drops = drops

    def behind(self, server: int, name: int, step: int) -> tuple[int, ...]:
        """Gives the indices of the workers whose mean a gradient of a group is; see `Ledger`."""
        ranks = self._behind.get((server, name, step), self._there.get(name, ()))
        return tuple(self._indices[rank] for rank in ranks)

    def regrouped(self, event: Regrouped) -> None:
        """From now on it is these."""
        self._there[event.rank] = tuple(event.members)

    def handled(self, event: Handled) -> None:
        """Notes who is behind a gradient that has come, or has come again after it was dropped."""
        message = event.message
        if message is None or message.kind is not Kind.PUSH:
            return
        key = event.server, self._name_of[event.source], message.step
        if key not in self._behind or (self._drops and message.step >= event.version_before):
            self._behind[key] = self._there[event.source]

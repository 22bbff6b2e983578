"""Groups of workers in front of servers: the invariants of servers, with a group or a leaf in the place of a worker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.parameter_server.levels.leaf_server import Levels
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.verification.invariant import (
    Conditions,
    Delivered,
    Ended,
    Handled,
    Invariant,
    Regrouped,
    Stepped,
)
from polyrhythm.verification.servers import Ledger

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


def of_rounds(conditions: Conditions, steps: int) -> Conditions:
    """Gives conditions in which a round's movement stands for a gradient, and the round for its step.

    Args:
        conditions: of the run.
        steps: of a round; the last of a run may have fewer.
    """
    gradient, total = conditions.gradient, conditions.steps

    def moved(worker: int, number: int) -> Tensor:
        assert gradient is not None, "asked only where gradients are known"
        stop = (number + 1) * steps if total is None else min((number + 1) * steps, total)
        return torch.stack([gradient(worker, step) for step in range(number * steps, stop)]).sum(0)

    return replace(
        conditions,
        gradient=None if gradient is None else moved,
        steps=None if total is None else -(-total // steps),
    )


class InRounds(Invariant):
    """Lets another invariant take rounds for steps.

    Args:
        inner: the other invariant.
        steps: of a round.
    """

    def __init__(self, inner: Invariant, steps: int) -> None:
        self._inner = inner
        self._steps = steps

    def delivered(self, event: Delivered) -> None:
        """Passes it on."""
        self._inner.delivered(event)

    def handled(self, event: Handled) -> None:
        """Passes it on: servers hear of rounds only."""
        self._inner.handled(event)

    def stepped(self, event: Stepped) -> None:
        """Passes it on if a round is over."""
        if (event.step + 1) % self._steps == 0:
            self._inner.stepped(replace(event, step=event.step // self._steps))

    def ended(self, event: Ended) -> None:
        """Passes it on, in rounds."""
        self._inner.ended(replace(event, steps=-(-event.steps // self._steps)))


class AtRoots(Invariant):
    """Every gradient that a leaf has taken is applied exactly once, on all shards.

    Args:
        conditions: with gradients that are known.
        levels: who belongs to whom.
        drops: whether late means are dropped.
    """

    def __init__(self, conditions: Conditions, levels: Levels, *, drops: bool) -> None:
        cast = conditions.cast
        self._indices = {rank: index for index, rank in enumerate(cast.workers)}
        self._leaves, self._roots = set(levels.leaves), set(levels.roots)
        self._taken: defaultdict[int, set[int]] = defaultdict(set)
        self._behind: dict[tuple[int, int], tuple[int, ...]] = {}
        roots = replace(conditions, cast=RoleAssignment(cast.workers, levels.roots))
        self._ledger = Ledger(roots, self._members, drops=drops)

    def handled(self, event: Handled) -> None:
        """Notes whose gradients a leaf has taken, and which of them are in a mean; passes on what roots do."""
        if event.server in self._leaves:
            self._note(event)
        elif event.server in self._roots:
            answers = [
                (to, reply._replace(kind=Kind.PARAMETERS) if reply.kind is Kind.VECTOR else reply)
                for to, reply in event.replies
            ]
            self._ledger.handled(replace(event, replies=answers))

    def _note(self, event: Handled) -> None:
        taken = self._taken[event.server]
        if event.message is not None and event.message.kind is Kind.PUSH:
            taken.add(self._indices[event.source])
        steps = {reply.step for _, reply in event.replies if reply.kind is Kind.PUSH}
        for step in steps:
            self._behind[event.server, step] = tuple(sorted(taken))
            taken.clear()

    def _members(self, root: int, leaf: int, step: int) -> tuple[int, ...]:
        return self._behind.get((leaf, step), ())

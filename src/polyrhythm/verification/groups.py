"""Groups of workers in front of servers: invariants of servers, with a group or a leaf in a worker's place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.parameter_server.hierarchical import Levels
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.verification.general import Filter
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


class OfMembers(Filter):
    """Pass on only the steps of some workers.

    Args:
        inner: the other invariant.
        ranks: of the workers.
    """

    def __init__(self, inner: Invariant, ranks: Collection[int]) -> None:
        super().__init__(inner)
        self._ranks = ranks

    def stepped(self, event: Stepped) -> None:
        if event.rank in self._ranks:
            self._inner.stepped(event)

    def regrouped(self, event: Regrouped) -> None:
        if event.rank in self._ranks:
            self._inner.regrouped(event)

    def ended(self, event: Ended) -> None:
        there = tuple(rank for rank in event.survivors if rank in self._ranks)
        if there:
            self._inner.ended(replace(event, survivors=there))


class OfGroups(Filter):
    """Show another invariant each group as one pusher, under the rank of its first member.

    Of the losses, only that of the member that speaks for its group is a loss of the pusher. A group survives if any
    member does.

    Args:
        inner: the other invariant.
        roles: which ranks do what.
        groups: ranks of the members of each.
    """

    def __init__(self, inner: Invariant, roles: RoleAssignment, groups: Sequence[tuple[int, ...]]) -> None:
        super().__init__(inner)
        self._name_of = {rank: ranks[0] for ranks in groups for rank in ranks}
        self._speaks: dict[tuple[int, int], int | None] = {
            (server, ranks[0]): ranks[0] for ranks in groups for server in roles.servers
        }
        self._speaks_next: dict[tuple[int, int], int] = {}

    def delivered(self, event: Delivered) -> None:
        source, to = self._named(event.source), self._named(event.to)
        self._inner.delivered(replace(event, source=source, to=to))

    def handled(self, event: Handled) -> None:
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

    def ended(self, event: Ended) -> None:
        there = tuple(sorted({self._named(rank) for rank in event.survivors}))
        taken, generations = event.taken, dict[int, int]()
        if taken is not None:
            members = {name: [rank for rank in taken if self._named(rank) == name] for name in there}
            taken = {name: max(taken[rank] for rank in ranks) for name, ranks in members.items()}
            generations = {
                name: max(event.generations.get(rank, 1) for rank in ranks) for name, ranks in members.items()
            }
        self._inner.ended(replace(event, survivors=there, generations=generations, taken=taken))

    def _named(self, rank: int) -> int:
        return self._name_of.get(rank, rank)


class Means(Invariant):
    """Note whose gradients are in what a group pushes; finds nothing wrong itself.

    Args:
        roles: which ranks do what.
        groups: ranks of the members of each.
        drops: whether a gradient may be dropped, and come again.
    """

    def __init__(self, roles: RoleAssignment, groups: Sequence[tuple[int, ...]], *, drops: bool) -> None:
        self._indices = {rank: index for index, rank in enumerate(roles.workers)}
        self._name_of = {rank: ranks[0] for ranks in groups for rank in ranks}
        self._there = {rank: ranks for ranks in groups for rank in ranks}
        self._behind: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._drops = drops

    def behind(self, server: int, name: int, step: int) -> tuple[int, ...]:
        """Return the indices of the workers whose mean a gradient of a group is; see `Ledger`."""
        ranks = self._behind.get((server, name, step), self._there.get(name, ()))
        return tuple(self._indices[rank] for rank in ranks)

    def regrouped(self, event: Regrouped) -> None:
        self._there[event.rank] = tuple(event.members)

    def handled(self, event: Handled) -> None:
        """Note whose mean a gradient is that has come, or has come again after it was dropped."""
        message = event.message
        if message is None or message.kind is not Kind.PUSH:
            return
        key = event.server, self._name_of[event.source], message.step
        if key not in self._behind or (self._drops and message.step >= event.version_before):
            self._behind[key] = self._there[event.source]


def of_rounds(conditions: Conditions, steps: int) -> Conditions:
    """Return conditions in which a round stands for a step, and what a model moves by in it for a gradient.

    Args:
        conditions: of the run.
        steps: of a round; the last of a run may have fewer.
    """
    # Where batches are drawn, nobody knows beforehand how long a group's last round is.
    gradient = None if conditions.units and steps > 1 else conditions.gradient
    total = None if conditions.units else conditions.steps

    def moved(worker: int, number: int) -> Tensor:
        assert gradient is not None, "asked only where gradients are known"
        stop = (number + 1) * steps if total is None else min((number + 1) * steps, total)
        return torch.stack([gradient(worker, step) for step in range(number * steps, stop)]).sum(0)

    return replace(
        conditions,
        gradient=None if gradient is None else moved,
        steps=None if conditions.steps is None else -(-conditions.steps // steps),
    )


class InRounds(Filter):
    """Show another invariant rounds as steps; servers hear of rounds only anyway.

    Args:
        inner: the other invariant.
        steps: of a round.
    """

    def __init__(self, inner: Invariant, steps: int) -> None:
        super().__init__(inner)
        self._steps = steps

    def stepped(self, event: Stepped) -> None:
        if (event.step + 1) % self._steps == 0:
            self._inner.stepped(replace(event, step=event.step // self._steps))

    def ended(self, event: Ended) -> None:
        taken = event.taken
        if taken is not None:
            taken = {rank: -(-steps // self._steps) for rank, steps in taken.items()}
        self._inner.ended(replace(event, steps=-(-event.steps // self._steps), taken=taken))


class AtRoots(Invariant):
    """Roots hold the sum of the leaves' means, and every gradient that a leaf has taken is in one, on all shards.

    Args:
        conditions: with known gradients.
        levels: which workers, leaves and roots belong together.
        drops: whether late means are dropped.
    """

    def __init__(self, conditions: Conditions, levels: Levels, *, drops: bool) -> None:
        roles = conditions.roles
        self._indices = {rank: index for index, rank in enumerate(roles.workers)}
        self._leaves, self._roots = set(levels.leaves), set(levels.roots)
        self._taken: defaultdict[int, set[int]] = defaultdict(set)
        self._behind: dict[tuple[int, int], tuple[int, ...]] = {}
        roots = replace(conditions, roles=RoleAssignment(roles.workers, levels.roots))
        self._ledger = Ledger(roots, self._members, drops=drops)

    def handled(self, event: Handled) -> None:
        """Note which workers are in a mean that a leaf makes, and check what roots do."""
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

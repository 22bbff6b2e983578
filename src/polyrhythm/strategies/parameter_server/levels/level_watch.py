"""The ledger of the roots: what they hold is the sum of the leaves' means, of whoever pushed for each."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from polyrhythm.communication.message import Kind
from polyrhythm.strategies.invariant import Conditions, Handled, Invariant
from polyrhythm.strategies.invariants.ledger import Ledger
from polyrhythm.strategies.parameter_server.levels.leaf_server import Levels
from polyrhythm.strategies.role_assignment import RoleAssignment


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

"""Who belongs to whom: workers to leaves, and leaves to roots."""

from __future__ import annotations

from dataclasses import dataclass

from polyrhythm.strategies.cast import Cast
from polyrhythm.training.flat_parameters import shards


@dataclass(frozen=True)
class Levels:
    """The ranks of both levels.

    Attributes:
        leaves: ranks of the leaf servers, one a group.
        roots: ranks of the root servers, in the order of their shards.
        groups: ranks of every group's workers, neighbours whose numbers differ by at most one group to group.
    """

    leaves: tuple[int, ...]
    roots: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, cast: Cast, groups: int) -> Levels:
        """Shares out the workers; the first servers are the leaves."""
        workers = cast.workers
        cuts = shards(len(workers), min(groups, len(workers)))
        members = [workers[cut] for cut in cuts] + [()] * (groups - len(cuts))
        return cls(cast.servers[:groups], cast.servers[groups:], tuple(members))

    @property
    def busy_leaves(self) -> tuple[int, ...]:
        """Ranks of the leaves that have workers."""
        return tuple(leaf for leaf, members in zip(self.leaves, self.groups, strict=True) if members)

    def leaf_of(self, worker: int) -> int:
        """Gives the rank of a worker's leaf."""
        return next(leaf for leaf, members in zip(self.leaves, self.groups, strict=True) if worker in members)

"""Which losses a script's ranks survive, as its strategy says; worker 0 tells the launcher, which knows no strategy."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass

from polyrhythm.roles.world import LEADER
from polyrhythm.strategies.strategy import Strategy


@dataclass(frozen=True)
class LossTolerance:
    """What a script's ranks can do without.

    Attributes:
        workers: how many there are; servers come after them.
        spares: whether the others go on without a worker that is not the first.
        spares_leader: whether they go on without the first one, if it has a successor.
        waits: whether they wait for that one.
        holders: of each shard, the indices of the servers that hold it.
        why_not: why a worker's death ends the run, for people; empty if it does not.
    """

    workers: int
    spares: bool
    spares_leader: bool = False
    waits: bool = False
    holders: tuple[tuple[int, ...], ...] = ()
    why_not: str = ""

    @classmethod
    def of(cls, strategy: Strategy, workers: int) -> LossTolerance:
        """Asks a strategy."""
        holders = tuple(tuple(strategy.holders(shard)) for shard in range(strategy.server_count))
        # Steps of groups that regroup apart cannot be taken again around a loop of a user's own.
        spares = strategy.goes_on(workers) and not strategy.regroups_apart(workers)
        leader = spares and strategy.spares_leader(workers)
        why_not = ""
        if strategy.regroups_apart(workers):
            why_not = (
                f"{strategy} goes on without a worker under polyrhythm train only, not in a loop of your own"
            )
        elif not spares and workers > 1:
            why_not = f"{strategy} does not go on without a worker"
        return cls(workers, spares, leader, strategy.regroups(workers), holders, why_not)

    def tolerates(self, rank: int, lost: Collection[int] = ()) -> bool:
        """Whether the others go on without a rank; without the first worker, if it has a successor.

        Args:
            rank: which.
            lost: ranks of servers that are lost already.
        """
        if rank == LEADER:
            return self.spares_leader
        if rank < self.workers:
            return self.spares
        gone = {other - self.workers for other in {rank, *lost}}
        return all(any(server not in gone for server in holders) for holders in self.holders)

    def to_text(self) -> str:
        """Writes it for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> LossTolerance:
        """Reads what `to_text` wrote."""
        told = json.loads(text)
        return cls(**told | {"holders": tuple(tuple(each) for each in told["holders"])})

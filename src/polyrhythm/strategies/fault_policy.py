"""What a run with a strategy does when a rank is lost: values that launchers, roles and the simulator read.

A strategy declares one (`Strategy.faults`). It holds plain values only, so a launcher that knows no strategy can
be told by way of JSON.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from polyrhythm.strategies.role_assignment import RoleAssignment


class OnLoss(StrEnum):
    """What the others do when a worker other than worker 0 is lost.

    Attributes:
        STOP: the run ends and names the lost worker.
        GO_ON: they go on as they are.
        REGROUP: all workers, which go in lockstep, agree on who is left (`Regroups.regroup`). All that their parts
            wait for must then pass through the workers' communicator, which is revoked.
        REGROUP_GROUP: the workers of its group do so by themselves (`RegroupsApart.reassemble`), without the other
            groups; servers decide who is in a group.
    """

    STOP = "stop"
    GO_ON = "go_on"
    REGROUP = "regroup"
    REGROUP_GROUP = "regroup_group"


class Rejoin(StrEnum):
    """Where the successor of a lost worker begins.

    Attributes:
        NEVER: there is none.
        BEHIND: some steps behind the others, and it cannot take a step unless they take theirs. Waiting for it
            anywhere but in a step would be a deadlock.
        LEVEL: where the others are, or it waits for nobody.
    """

    NEVER = "never"
    BEHIND = "behind"
    LEVEL = "level"


@dataclass(frozen=True, kw_only=True)
class FaultPolicy:
    """Which losses a run survives, and how.

    Attributes:
        worker: what the others do when a worker other than worker 0 is lost.
        leader: whether the run survives the loss of worker 0 until its successor takes over the lead. It can where
            servers hold the parameters, or where each of the remaining workers does.
        spares: how many workers may be lost at once.
        rejoin: where a successor begins.
        holders: for each shard, the indices of the servers that hold it, the one that workers ask first at the front;
            empty where every server alone holds its own shard.
        may_repeat: whether workers that regroup may have to repeat a step that they had completed.
        skips_not_finite: whether a gradient that is not finite is left out and the run goes on without it.
    """

    worker: OnLoss = OnLoss.STOP
    leader: bool = False
    spares: int = 0
    rejoin: Rejoin = Rejoin.NEVER
    holders: tuple[tuple[int, ...], ...] = ()
    may_repeat: bool = False
    skips_not_finite: bool = False

    @classmethod
    def regrouping(cls, workers: int, *, possible: bool = True, may_repeat: bool = False) -> Self:
        """Return the policy of workers in lockstep, each of which holds the parameters: those who are left regroup.

        Args:
            workers: how many there are; one alone has nobody to regroup with.
            possible: whether they can; otherwise the run stops.
            may_repeat: see the class.
        """
        if workers == 1 or not possible:
            return cls(may_repeat=may_repeat)
        return cls(
            worker=OnLoss.REGROUP,
            leader=True,
            spares=workers - 1,
            rejoin=Rejoin.LEVEL,
            may_repeat=may_repeat,
        )

    @property
    def goes_on(self) -> bool:
        """Whether the others go on without a worker other than worker 0, and its successor may join them."""
        return self.worker is not OnLoss.STOP

    @property
    def regroups(self) -> bool:
        """Whether all workers regroup together."""
        return self.worker is OnLoss.REGROUP

    @property
    def regroups_apart(self) -> bool:
        """Whether each group of workers regroups by itself."""
        return self.worker is OnLoss.REGROUP_GROUP

    def shards_of(self, server: int) -> list[int]:
        """Return the shards that a server holds, given by its index, its own first."""
        others = (
            shard for shard, holders in enumerate(self.holders) if server in holders and shard != server
        )
        return [server, *others]

    def holders_of(self, shard: int) -> tuple[int, ...]:
        """Return the indices of the servers that hold a shard, the one that workers ask first at the front."""
        return self.holders[shard] if self.holders else (shard,)

    def keeps_shards(self, lost: Collection[int]) -> bool:
        """Return whether every shard is still held by a server when those of these indices are lost."""
        if not self.holders:
            return not lost
        return all(any(server not in lost for server in holders) for holders in self.holders)

    def survives(
        self, rank: int, roles: RoleAssignment, lost: Collection[int] = (), *, leader_returns: bool = False
    ) -> bool:
        """Return whether the run goes on when a rank is lost.

        Args:
            rank: the lost one.
            roles: of all ranks.
            lost: ranks of servers that are lost already.
            leader_returns: whether whoever started the ranks gives worker 0 a successor.
        """
        if rank == roles.workers[0]:
            return leader_returns and self.leader
        if rank in roles.servers:
            return self.keeps_shards([roles.servers.index(each) for each in {rank, *lost}])
        return roles.works(rank) and self.goes_on

    def to_json(self) -> dict[str, Any]:
        """Return the values as JSON has them."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return the policy that `to_json` gave."""
        return cls(
            **values
            | {
                "worker": OnLoss(values["worker"]),
                "rejoin": Rejoin(values["rejoin"]),
                "holders": tuple(tuple(each) for each in values["holders"]),
            }
        )

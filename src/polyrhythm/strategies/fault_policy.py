"""Reaction of a run to failed ranks: values that launchers, roles and the simulator read.

A strategy declares one (`Strategy.faults`). It holds plain values only, so it can be sent as JSON to a launcher that
does not import strategies.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from polyrhythm.strategies.role_assignment import RoleAssignment


class OnLoss(StrEnum):
    """Reaction of the other workers when a worker other than rank 0 fails.

    Attributes:
        STOP: the run ends with an error that names the failed worker.
        GO_ON: the others continue unchanged.
        REGROUP: the workers, all synchronous, agree on the next view (`Logged`). Every wait of their parts must
            then be on the workers' communicator, which is revoked.
        REGROUP_GROUP: the workers of its group do so, independently of the other groups; the first server makes the
            views.
    """

    STOP = "stop"
    GO_ON = "go_on"
    REGROUP = "regroup"
    REGROUP_GROUP = "regroup_group"


class Rejoin(StrEnum):
    """Start step of the replacement of a failed worker.

    Attributes:
        NEVER: none: failed workers are not replaced.
        BEHIND: a step before the others' current one; the replacement cannot take a step unless they take theirs.
            Waiting for it outside a step would be a deadlock.
        LEVEL: the others' current step, or any step if the replacement never waits for another worker.
    """

    NEVER = "never"
    BEHIND = "behind"
    LEVEL = "level"


@dataclass(frozen=True, kw_only=True)
class FaultPolicy:
    """Failures that a run survives, and its reaction.

    Attributes:
        worker: reaction of the others when a worker other than rank 0 fails.
        leader: whether the run survives a failure of rank 0 until its replacement coordinates. It can where servers
            hold the parameters, or where each of the remaining workers does.
        spares: number of workers that may fail at once.
        rejoin: start step of a replacement.
        holders: indices of the servers that hold each shard, in the order in which workers address them;
            empty where every server holds only its own shard.
        may_repeat: whether workers that regroup may have to repeat a completed step.
        skips_not_finite: whether a gradient that is not finite is skipped and the run continues without it.
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
        """Return the policy of synchronous workers that each hold the parameters: the remaining ones regroup.

        Args:
            workers: number of workers; a single one cannot regroup.
            possible: whether they can regroup; otherwise the run stops.
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

    @classmethod
    def independent(cls, workers: int, rejoin: Rejoin = Rejoin.LEVEL) -> Self:
        """Return the policy of workers that do not need each other: the others continue, up to the last one.

        Args:
            workers: number of workers.
            rejoin: start step of a replacement.
        """
        return cls(worker=OnLoss.GO_ON, leader=True, spares=workers - 1, rejoin=rejoin)

    @property
    def continues(self) -> bool:
        """Whether the others continue without a worker other than rank 0, and its replacement may join them."""
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
        """Return the shards of the server with index `server`, its own first."""
        others = (
            shard for shard, holders in enumerate(self.holders) if server in holders and shard != server
        )
        return [server, *others]

    def holders_of(self, shard: int) -> tuple[int, ...]:
        """Return the indices of the servers that hold a shard, in the order in which workers address them."""
        return self.holders[shard] if self.holders else (shard,)

    def keeps_shards(self, lost: Collection[int]) -> bool:
        """Return whether every shard is still held by a server when the servers with indices `lost` have failed."""
        if not self.holders:
            return not lost
        return all(any(server not in lost for server in holders) for holders in self.holders)

    def survives(
        self, rank: int, roles: RoleAssignment, lost: Collection[int] = (), *, leader_returns: bool = False
    ) -> bool:
        """Return whether the run continues when a rank fails.

        Args:
            rank: the failed rank.
            roles: roles of all ranks.
            lost: ranks of servers that have failed already.
            leader_returns: whether the launcher replaces rank 0.
        """
        if rank == roles.workers[0]:
            return leader_returns and self.leader
        if rank in roles.servers:
            return self.keeps_shards([roles.servers.index(each) for each in {rank, *lost}])
        return roles.works(rank) and self.continues

    def to_json(self) -> dict[str, Any]:
        """Return the policy as a dict of JSON values, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return the policy from the result of `to_json`."""
        return cls(
            **values
            | {
                "worker": OnLoss(values["worker"]),
                "rejoin": Rejoin(values["rejoin"]),
                "holders": tuple(tuple(each) for each in values["holders"]),
            }
        )

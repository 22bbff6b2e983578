"""How a process that runs a user's script finds the other ranks, by whichever way it was started.

    torchrun         WORLD_SIZE processes; as many of them as the strategy needs are its servers
    polyrhythm run   POLYRHYTHM_WORKERS processes, all of them workers; rank 0 asks the launcher for the servers
    neither          one worker alone

Under `polyrhythm run` the number of servers is not known before a script has said what its strategy is. So
workers are ranks 0 … N-1 of WORLD_SIZE = N, and servers are ranks N … N+S-1 of WORLD_SIZE = N+S.

The store carries what ranks and launcher tell each other. `LossTolerance` says which losses the ranks
survive, as their strategy says: worker 0 tells the launcher, which knows no strategy. `Places` says which
workers are there, since the launcher knows first who is gone:

launcher    HERE ─────▶ GONE, or COMING if it starts a successor
successor               COMING ─▶ WAITING, where others regroup ─▶ HERE, or BEHIND where it stays behind the others
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch.distributed as dist

from polyrhythm.communication.transports.torch_distributed.rendezvous import (
    LOOPBACK,
    Rendezvous,
    from_environment,
    newest_incarnations,
)
from polyrhythm.errors import RequestError
from polyrhythm.launch.patience import Patience
from polyrhythm.launch.torchrun.gathering import gather
from polyrhythm.launch.torchrun.started_rank import cast_of, started_by_torchrun
from polyrhythm.roles.world import LEADER
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.strategy import Strategy

WORKERS_VARIABLE = "POLYRHYTHM_WORKERS"
"""Set by `polyrhythm run` in every rank: the number of workers."""

INCARNATION_VARIABLE = "POLYRHYTHM_INCARNATION"
"""Set by `polyrhythm run`: how many processes have had a rank before this one."""

RETURNS_VARIABLE = "POLYRHYTHM_LEADER_RETURNS"
"""Set by `polyrhythm run` in every rank: 1 if worker 0 is started again when it is lost, as any other; else 0."""

LOSS_TOLERANCE_KEY = "script/loss_tolerance"
"""Set in the store by rank 0: which losses the ranks survive; see `LossTolerance`."""

SERVERS_KEY = "script/servers"
"""Set in the store by rank 0, after that: how many servers the launcher must start."""

ADMITS_KEY = "script/admits"
"""Set in the store by rank 0 when its loop says where it is: empty, or why no successor of a worker can come in."""

OVER_KEY = "script/over"
"""Set in the store by rank 0 when all have come to the end: who comes now comes too late."""

WHOLE_KEY = "script/whole"
"""Set in the store, with a rank and incarnation behind, by rank 0 when the successor of a server has its shards."""

LET_GO_KEY = "script/let-go"
"""Set in the store, with its rank and incarnation behind, by a worker that servers have let go."""

FAILED_KEY = "script/failed"
"""Set in the store by the first rank whose training raised something of its own: the others' errors are echoes."""

_STRATEGY_KEY = "script/strategy"
_THIS_PROCESS = secrets.token_hex(8)
"""Drawn anew in a process that torchrun starts again, while the store stays."""


def started_by_run() -> bool:
    """Whether `polyrhythm run` has started this process."""
    return WORKERS_VARIABLE in os.environ


def leader_returns() -> bool:
    """Whether worker 0 gets a successor when it is lost."""
    return os.environ.get(RETURNS_VARIABLE) == "1"


def begun_key(worker: int) -> str:
    """Where in the store a worker of a script says which epoch it has begun."""
    return f"script/begun/{worker}"


def meet(strategy: Strategy) -> tuple[Rendezvous, RoleAssignment]:
    """Finds the other ranks and gives every rank its role.

    Raises:
        RequestError: too few processes for the strategy, another strategy than rank 0's, or a second meeting.
        RunError: the others cannot be reached.
    """
    if started_by_run():
        return _at_launcher(strategy)
    if started_by_torchrun():
        return _at_torchrun(strategy)
    return _alone(strategy)


def _at_launcher(strategy: Strategy) -> tuple[Rendezvous, RoleAssignment]:
    workers = int(os.environ[WORKERS_VARIABLE])
    strategy.check(workers)
    servers = strategy.traits(workers).servers
    size = workers + servers
    incarnation = int(os.environ.get(INCARNATION_VARIABLE, "0"))
    rendezvous = replace(from_environment(), size=size, incarnation=incarnation)
    if incarnation:
        rendezvous = replace(rendezvous, met=newest_incarnations(rendezvous.store, size))
    _join_once(rendezvous)
    _agree(rendezvous, strategy)
    if rendezvous.rank == 0:
        rendezvous.store.set(LOSS_TOLERANCE_KEY, LossTolerance.of(strategy, workers).to_text())
        rendezvous.store.set(SERVERS_KEY, str(servers))
    return rendezvous, RoleAssignment(tuple(range(workers)), tuple(range(workers, size)))


def _at_torchrun(strategy: Strategy) -> tuple[Rendezvous, RoleAssignment]:
    rendezvous = from_environment()
    _join_once(rendezvous)
    rendezvous = gather(rendezvous).rendezvous
    _agree(rendezvous, strategy)
    cast = cast_of(strategy, rendezvous)
    strategy.check(len(cast.workers))
    return rendezvous, cast


def _alone(strategy: Strategy) -> tuple[Rendezvous, RoleAssignment]:
    strategy.check(1)
    servers = strategy.traits(1).servers
    if servers:
        script = Path(sys.argv[0]).name or "script.py"
        raise RequestError(
            f"{strategy} needs {servers} {'server' if servers == 1 else 'servers'} beside its workers: start with "
            f"`polyrhythm run --workers 2 {script}` or `torchrun --nproc-per-node {servers + 2} {script}`"
        )
    return Rendezvous(dist.HashStore(), 0, 1, LOOPBACK), RoleAssignment((0,))


def _join_once(rendezvous: Rendezvous) -> None:
    if rendezvous.store.add(f"script/joined/{rendezvous.rank}/{_THIS_PROCESS}", 1) > 1:
        raise RequestError(
            "this process has joined before, and its servers have left: train within one `with`, and start again "
            "for another"
        )


def _agree(rendezvous: Rendezvous, strategy: Strategy) -> None:
    """Sees to it that all ranks mean the same run."""
    store, rank = rendezvous.store, rendezvous.rank
    if rank == 0:
        store.set(_STRATEGY_KEY, str(strategy))
        return
    leaders = Patience().key(store, _STRATEGY_KEY, 0)
    if leaders != str(strategy):
        raise RequestError(f"rank {rank} joins with {strategy}, rank 0 with {leaders}: give all the same")


class Place(StrEnum):
    """What has become of a worker's place."""

    HERE = "here"
    GONE = "gone"
    COMING = "coming"  # a successor is started
    WAITING = "waiting"  # a successor waits for the next epoch
    BEHIND = "behind"  # a successor takes part, steps behind the others, who must not wait for it


class Places:
    """Those of all workers.

    Args:
        store: where the ranks meet.
        workers: how many there are.
        is_lost: whether this rank knows a worker to be gone; asked where no launcher says so.
    """

    def __init__(
        self, store: Any, workers: int, is_lost: Callable[[int], bool] = lambda worker: False
    ) -> None:
        self._store = store
        self._keys = [f"script/place/{worker}" for worker in range(workers)]
        self._is_lost = is_lost

    def begin(self) -> None:
        """Says that all are there, or about to be; only a launcher does."""
        for worker in range(len(self._keys)):
            self.set(worker, Place.HERE)

    def set(self, worker: int, place: Place) -> None:
        """Says what has become of a worker."""
        self._store.set(self._keys[worker], place.value)

    def of(self, worker: int) -> Place:
        """Gives what has become of a worker."""
        return self.read()[worker]

    def read(self) -> list[Place]:
        """Gives what has become of all."""
        if not self._store.check(self._keys):  # torchrun's
            return [Place.GONE if self._is_lost(worker) else Place.HERE for worker in range(len(self._keys))]
        return [Place(bytes(value).decode()) for value in self._store.multi_get(self._keys)]


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
        faults = strategy.faults(workers)
        holders = tuple(map(faults.holders_of, range(strategy.traits(workers).servers)))
        # Steps of groups that regroup apart cannot be taken again around a loop of a user's own.
        spares = faults.goes_on and not faults.regroups_apart
        leader = spares and faults.leader
        why_not = ""
        if faults.regroups_apart:
            why_not = (
                f"{strategy} goes on without a worker under polyrhythm train only, not in a loop of your own"
            )
        elif not spares and workers > 1:
            why_not = f"{strategy} does not go on without a worker"
        return cls(workers, spares, leader, faults.regroups, holders, why_not)

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

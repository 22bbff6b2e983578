"""How a process that runs a user's script finds the other ranks, by whichever way it was started.

    torchrun         WORLD_SIZE processes; as many of them as the strategy needs are its servers
    polyrhythm run   POLYRHYTHM_WORKERS processes, all of them workers; rank 0 asks the launcher for the servers
    neither          one worker alone

Under `polyrhythm run` nobody knows how many servers there must be before a script has said what its strategy is. So
workers are ranks 0 … N-1 of WORLD_SIZE = N, and servers are ranks N … N+S-1 of WORLD_SIZE = N+S.
"""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from polyrhythm.communication.transports.torch_distributed.link_words import newest_incarnations
from polyrhythm.communication.transports.torch_distributed.rendezvous import (
    LOOPBACK,
    Rendezvous,
    from_environment,
)
from polyrhythm.errors import RequestError
from polyrhythm.launch.patience import Patience
from polyrhythm.launch.script.loss_tolerance import LossTolerance
from polyrhythm.launch.torchrun.gathering import gather
from polyrhythm.launch.torchrun.started_rank import cast_of, started_by_torchrun
from polyrhythm.strategies.cast import Cast
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


def meet(strategy: Strategy) -> tuple[Rendezvous, Cast]:
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


def _at_launcher(strategy: Strategy) -> tuple[Rendezvous, Cast]:
    workers = int(os.environ[WORKERS_VARIABLE])
    strategy.check(workers)
    size = workers + strategy.server_count
    incarnation = int(os.environ.get(INCARNATION_VARIABLE, "0"))
    rendezvous = replace(from_environment(), size=size, incarnation=incarnation)
    if incarnation:
        rendezvous = replace(rendezvous, met=newest_incarnations(rendezvous.store, size))
    _join_once(rendezvous)
    _agree(rendezvous, strategy)
    if rendezvous.rank == 0:
        rendezvous.store.set(LOSS_TOLERANCE_KEY, LossTolerance.of(strategy, workers).to_text())
        rendezvous.store.set(SERVERS_KEY, str(strategy.server_count))
    return rendezvous, Cast(tuple(range(workers)), tuple(range(workers, size)))


def _at_torchrun(strategy: Strategy) -> tuple[Rendezvous, Cast]:
    rendezvous = from_environment()
    _join_once(rendezvous)
    rendezvous = gather(rendezvous).rendezvous
    _agree(rendezvous, strategy)
    cast = cast_of(strategy, rendezvous)
    strategy.check(len(cast.workers))
    return rendezvous, cast


def _alone(strategy: Strategy) -> tuple[Rendezvous, Cast]:
    strategy.check(1)
    servers = strategy.server_count
    if servers:
        script = Path(sys.argv[0]).name or "script.py"
        raise RequestError(
            f"{strategy} needs {servers} {'server' if servers == 1 else 'servers'} beside its workers: start with "
            f"`polyrhythm run --workers 2 {script}` or `torchrun --nproc-per-node {servers + 2} {script}`"
        )
    return Rendezvous(dist.HashStore(), 0, 1, LOOPBACK), Cast((0,))


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

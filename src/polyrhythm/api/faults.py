"""What becomes of a run when something goes wrong: told from what its strategy declares, and from nothing else."""

from __future__ import annotations

from enum import StrEnum

from polyrhythm.roles.world import LEADER
from polyrhythm.strategies.role_assignment import cast_in_order
from polyrhythm.strategies.strategy import Strategy

REPRESENTATIVES = ("synchronous", "local_sgd", "ad_psgd", "parameter_server")
"""One strategy a family: where all run the same code, these are tested on real processes for the others."""

SENDING_IN_STEP = ("d_psgd", "parameter_server(consistency=synchronous)")
"""Tried too where a host is cut off: all of them send to the one that is, and none may wait until it has taken that."""

IN_TURNS = ("d_psgd",)
"""Tried too where worker 0 is lost: no step of theirs joins all, and yet all must muster."""

WAITING_IN_STEP = ("parameter_server(consistency=synchronous)",)
"""Tried too where worker 0 is killed: others wait for it in lock-step, and what it waits for must not wait for it."""
IN_SHARED_MEMORY = ("hogwild",)
"""Tried too where worker 0 is killed: its successor finds what the run has come to in the memory of the others."""

VARIATIONS = (
    "parameter_server(consistency=synchronous)",
    "parameter_server(servers=2, replicas=2)",
    "easgd(mode=synchronous, tau=1)",
)
"""Strategies of other outcomes than with their defaults."""


class Fault(StrEnum):
    """What goes wrong."""

    WORKER_KILLED = "a worker killed"
    LEADER_KILLED = "worker 0 killed"
    SERVER_KILLED = "a server killed"
    STOPPED = "a rank stopped, and continued"
    CUT_OFF = "a worker's host cut off"
    NOT_FINITE = "gradients not finite"
    DISK_FULL = "disk full"
    DAMAGED = "checkpoint damaged"


class Outcome(StrEnum):
    """What becomes of the run."""

    GOES_ON = "goes on"
    REGROUPS = "regroups, goes on"
    STOPS = "stops, named"
    NAMED = "named, goes on"
    LEFT_OUT = "left out, goes on"
    ENDS = "stops, says where"
    KEEPS = "goes on, keeps the last"
    OLDER = "goes on from the one before"
    NONE = "–"


def outcomes(strategy: Strategy, workers: int = 3) -> dict[Fault, Outcome]:
    """Gives the outcome of every fault, where `train` may start a successor of a lost worker.

    Args:
        strategy: of the run.
        workers: how many there are.
    """
    traits, faults = strategy.traits(workers), strategy.faults(workers)
    cast = cast_in_order(workers, traits.servers)

    def without(rank: int) -> Outcome:
        if not faults.survives(rank, cast, leader_returns=True):
            return Outcome.STOPS
        return Outcome.REGROUPS if faults.regroups else Outcome.GOES_ON

    return {
        Fault.WORKER_KILLED: without(cast.workers[-1]),
        Fault.LEADER_KILLED: without(LEADER),
        Fault.SERVER_KILLED: without(cast.servers[0]) if cast.servers else Outcome.NONE,
        Fault.STOPPED: Outcome.NAMED,
        Fault.CUT_OFF: Outcome.NONE if traits.one_host else without(cast.workers[-1]),
        Fault.NOT_FINITE: Outcome.LEFT_OUT if faults.skips_not_finite else Outcome.ENDS,
        Fault.DISK_FULL: Outcome.KEEPS,
        Fault.DAMAGED: Outcome.OLDER,
    }


def is_tested(strategy: str, fault: Fault) -> bool:
    """Whether the test suite lets this fault happen to real processes of a strategy, by its name or spec."""
    if fault is Fault.CUT_OFF:
        return strategy in REPRESENTATIVES + SENDING_IN_STEP
    if fault is Fault.LEADER_KILLED:
        return strategy in REPRESENTATIVES + IN_TURNS + WAITING_IN_STEP + IN_SHARED_MEMORY
    if fault in (Fault.DISK_FULL, Fault.DAMAGED):
        return strategy in REPRESENTATIVES
    return True

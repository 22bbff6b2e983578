"""Outcomes of faults, derived from the declarations of a strategy alone."""

from __future__ import annotations

from enum import StrEnum

from polyrhythm.roles.world import LEADER
from polyrhythm.strategies.role_assignment import roles_in_order
from polyrhythm.strategies.strategy import Strategy

REPRESENTATIVES = ("synchronous", "local_sgd", "ad_psgd", "parameter_server")
"""One strategy per family: where all run the same code, these are tested on real processes for the others."""

SENDING_IN_STEP = ("d_psgd", "parameter_server(consistency=synchronous)")
"""Also tested with a host cut off: all workers send to the one on it, and none may wait until it has received."""

IN_TURNS = ("d_psgd",)
"""Also tested with worker 0 lost: no single step of theirs involves all workers, yet all must regroup."""

WAITING_IN_STEP = ("parameter_server(consistency=synchronous)",)
"""Also tested with worker 0 killed: others wait for it in lockstep, and what it waits for must not wait for it."""
IN_SHARED_MEMORY = ("hogwild",)
"""Also tested with worker 0 killed: its replacement finds the state of the run in the memory of the others."""

VARIATIONS = (
    "parameter_server(consistency=synchronous)",
    "parameter_server(servers=2, replicas=2)",
    "easgd(mode=synchronous, tau=1)",
)
"""Strategies with outcomes that differ from those with their default keys."""


class Fault(StrEnum):
    """Kinds of faults."""

    WORKER_KILLED = "a worker killed"
    LEADER_KILLED = "worker 0 killed"
    SERVER_KILLED = "a server killed"
    STOPPED = "a rank stopped, and continued"
    CUT_OFF = "a worker's host cut off"
    NOT_FINITE = "gradients not finite"
    DISK_FULL = "disk full"
    DAMAGED = "checkpoint damaged"


class Outcome(StrEnum):
    """Outcomes of a fault for the run."""

    CONTINUES = "continues"
    REGROUPS = "regroups, continues"
    STOPS = "stops, named"
    NAMED = "named, continues"
    LEFT_OUT = "dropped, continues"
    ENDS = "stops, reports where"
    KEEPS = "continues, keeps the last"
    OLDER = "continues from the previous one"
    NONE = "–"


def outcomes(strategy: Strategy, workers: int = 3) -> dict[Fault, Outcome]:
    """Return the outcome of every fault, if `train` may start a replacement of a lost worker.

    Args:
        strategy: strategy of the run.
        workers: number of workers.
    """
    traits, faults = strategy.traits(workers), strategy.faults(workers)
    roles = roles_in_order(workers, traits.servers)

    def without(rank: int) -> Outcome:
        if not faults.survives(rank, roles, leader_returns=True):
            return Outcome.STOPS
        return Outcome.REGROUPS if faults.regroups else Outcome.CONTINUES

    return {
        Fault.WORKER_KILLED: without(roles.workers[-1]),
        Fault.LEADER_KILLED: without(LEADER),
        Fault.SERVER_KILLED: without(roles.servers[0]) if roles.servers else Outcome.NONE,
        Fault.STOPPED: Outcome.NAMED,
        Fault.CUT_OFF: Outcome.NONE if traits.one_host else without(roles.workers[-1]),
        Fault.NOT_FINITE: Outcome.LEFT_OUT if faults.skips_not_finite else Outcome.ENDS,
        Fault.DISK_FULL: Outcome.KEEPS,
        Fault.DAMAGED: Outcome.OLDER,
    }


def is_tested(strategy: str, fault: Fault) -> bool:
    """Whether the test suite injects this fault into real processes of a strategy, given by name or spec."""
    if fault is Fault.CUT_OFF:
        return strategy in REPRESENTATIVES + SENDING_IN_STEP
    if fault is Fault.LEADER_KILLED:
        return strategy in REPRESENTATIVES + IN_TURNS + WAITING_IN_STEP + IN_SHARED_MEMORY
    if fault in (Fault.DISK_FULL, Fault.DAMAGED):
        return strategy in REPRESENTATIVES
    return True

"""Ranks started by torchrun or Slurm's srun: the rank that reports an error which all of them find.

srun's variables are translated to torchrun's at the start:

    srun                                                    torchrun
    SLURM_PROCID, SLURM_NTASKS                              RANK, WORLD_SIZE
    SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE                LOCAL_RANK, LOCAL_WORLD_SIZE
    SLURM_NODEID                                            GROUP_RANK
    the first node of SLURM_STEP_NODELIST, the job's number MASTER_ADDR, MASTER_PORT     unless they are there

A step of one task is no group of ranks: `train` then starts its workers itself, as anywhere else.

Imports nothing that is slow: the command line asks before PyTorch is there.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress

from polyrhythm.errors import PolyrhythmError
from polyrhythm.launch.process import first_parent as first_parent

_LINGER_S = 10.0
_FIRST_PORT, _PORTS = 20000, 30000


class ReportedByLeader(PolyrhythmError):
    """Error that rank 0 reports; this rank stays silent about it."""


def started_by_torchrun() -> bool:
    """Whether this process is a rank that torchrun (or something that speaks like it) has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def leads() -> bool:
    """Whether this process is rank 0."""
    return os.environ.get("RANK") == "0"


def is_silent() -> bool:
    """Whether another rank speaks for this one."""
    return started_by_torchrun() and not leads()


@contextmanager
def leader_speaks() -> Iterator[None]:
    """Run code that every rank executes alike before they meet, and let only rank 0 report its errors.

    Raises:
        ReportedByLeader: instead of this project's other errors, on every rank but 0.
    """
    try:
        yield
    except PolyrhythmError as error:
        if is_silent():
            raise ReportedByLeader(str(error)) from error
        raise


def linger() -> None:
    """Wait to be ended: torchrun ends all ranks as soon as one has failed, and rank 0 must be the first to fail."""
    with suppress(KeyboardInterrupt):
        time.sleep(_LINGER_S)


def adopt_step(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables if this process is one of several tasks of a step that srun has started."""
    if "RANK" in environment or "SLURM_STEP_ID" not in environment:
        return
    tasks = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))
    if "SLURM_HET_SIZE" in environment:  # several components: a step's own count is that of one of them
        tasks = environment.get("SLURM_NTASKS", tasks)
    if int(tasks) < 2:
        return
    node = int(environment.get("SLURM_NODEID", "0"))
    environment.update(
        RANK=environment["SLURM_PROCID"],
        WORLD_SIZE=tasks,
        LOCAL_RANK=environment.get("SLURM_LOCALID", "0"),
        LOCAL_WORLD_SIZE=str(tasks_of(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"), node)),
        GROUP_RANK=str(node),
    )
    environment.setdefault("MASTER_ADDR", first_host(environment.get("SLURM_STEP_NODELIST", "localhost")))
    port = _FIRST_PORT + int(environment.get("SLURM_JOB_ID", "0")) % _PORTS
    environment.setdefault("MASTER_PORT", str(port))


def tasks_of(counts: str, node: int) -> int:
    """Return the tasks of a node from Slurm's list of counts, such as `2(x3),1`: three nodes with two, one with one."""
    for part in counts.split(","):
        count, _, times = part.partition("(x")
        node -= int(times.rstrip(")") or 1)
        if node < 0:
            return int(count)
    return 1


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list, such as `rack[07-09,12],login`: rack07."""
    return re.sub(r"^([^,\[]*)(?:\[([^\],-]*)[^\]]*\])?([^,\[]*).*$", r"\1\2\3", nodes)

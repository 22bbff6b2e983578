"""Ranks that Slurm's srun has started: what srun says in its variables, said in torchrun's.

    srun                                                    torchrun
    SLURM_PROCID, SLURM_NTASKS                              RANK, WORLD_SIZE
    SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE                LOCAL_RANK, LOCAL_WORLD_SIZE
    SLURM_NODEID                                            GROUP_RANK
    the first node of SLURM_STEP_NODELIST, the job's number MASTER_ADDR, MASTER_PORT     unless they are there

A step of one task is no group of ranks: `train` then starts its workers itself, as anywhere else.

Imports nothing that is slow: the command line imports it first.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping

_FIRST_PORT, _PORTS = 20000, 30000


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

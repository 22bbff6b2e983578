"""`polyrhythm run`: a user's script as the ranks of a run, all on this host.

launcher                        worker 0 … N-1               server N … N+S-1
host the store
start the workers ────────────▶ script … join(strategy)
◀──── S, by way of the store ── (worker 0)
start the servers ──────────────────────────────────────────▶ script … join(strategy): serve, leave
wait for all, and see who can be done without (`watch.py`)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from polyrhythm.communication.transports.torch_distributed.rendezvous import PREFIX, host_store
from polyrhythm.errors import RequestError
from polyrhythm.launch.script.ranks import ScriptRanks
from polyrhythm.launch.script.watch import ScriptWatch
from polyrhythm.launch.signals import asked_to_stop

_LOOK_EVERY_S = 0.02
RESTARTS = 3
"""How many successors of lost ranks there may be, unless told otherwise."""


def run_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    workers: int,
    threads: int | None = None,
    restarts: int = RESTARTS,
) -> None:
    """Runs a script that calls `polyrhythm.join`: once a worker, and once a server that its strategy asks for.

    Ranks have torchrun's variables in their environment, and the output streams of this process. When one is killed
    that its strategy can do without, the others go on, and it is started again where the loop says where it is
    (`group.epochs`). When one fails otherwise, the others are ended; they also end with this process, however it ends
    (Linux).

    Args:
        script: a Python file.
        arguments: for the script.
        workers: how many.
        threads: compute threads of each worker; None leaves OMP_NUM_THREADS as it is, or shares the cores out.
        restarts: how many successors of lost ranks there may be.

    Raises:
        RequestError: there is no such script, or no worker.
        RunError: a rank failed that the others cannot do without.
        KeyboardInterrupt: SIGINT or SIGTERM came.
    """
    _check(script, workers, threads, restarts)
    store = host_store()
    command = [sys.executable, str(script), *arguments]
    ranks = ScriptRanks(command, workers, threads, store.port, leader_returns=restarts > 0)
    watch = ScriptWatch(ranks, dist.PrefixStore(PREFIX, store), restarts)
    try:
        with asked_to_stop(_interrupt):
            ranks.start_workers()
            while watch.poll():
                time.sleep(_LOOK_EVERY_S)
            watch.raise_failure()
    finally:
        ranks.end()


def _check(script: str | Path, workers: int, threads: int | None, restarts: int) -> None:
    if not Path(script).is_file():
        raise RequestError(f"there is no script {script}: give the path of a Python file")
    for what, number in (("workers", workers), ("threads", 1 if threads is None else threads)):
        if number < 1:
            raise RequestError(f"{what} must be at least 1 (given {number})")
    if restarts < 0:
        raise RequestError(f"restarts must be at least 0 (given {restarts})")


def _interrupt() -> None:
    raise KeyboardInterrupt

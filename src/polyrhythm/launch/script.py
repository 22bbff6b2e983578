"""`polyrhythm run`: a user's script as the ranks of a run, all on this host.

launcher                        worker 0 … N-1               server N … N+S-1
host the store
start the workers ────────────▶ script … join(strategy)
◀──── S, by way of the store ── (worker 0)
start the servers ──────────────────────────────────────────▶ script … join(strategy): serve, leave
wait for all
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from polyrhythm.communication.transports.torch_distributed.rendezvous import LOOPBACK, PREFIX, host_store
from polyrhythm.errors import RequestError, RunError
from polyrhythm.launch import tethered
from polyrhythm.launch.cores import available_cores
from polyrhythm.launch.meeting import FAILED_KEY, SERVERS_KEY, WORKERS_VARIABLE
from polyrhythm.launch.signals import asked_to_stop

_LOOK_EVERY_S = 0.05
_GRACE_S = 3.0
"""How long ranks may take to say what they saw after another has failed, and to leave when asked."""


@dataclass(frozen=True)
class _Rank:
    name: str
    process: subprocess.Popen[bytes]


def run_script(
    script: str | Path, arguments: Sequence[str] = (), *, workers: int, threads: int | None = None
) -> None:
    """Runs a script that calls `polyrhythm.join`: once a worker, and once a server that its strategy asks for.

    Ranks have torchrun's variables in their environment, and the output streams of this process. When one fails, the
    others are ended; they also end with this process, however it ends (Linux).

    Args:
        script: a Python file.
        arguments: for the script.
        workers: how many.
        threads: compute threads of each worker; None leaves OMP_NUM_THREADS as it is, or shares the cores out.

    Raises:
        RequestError: there is no such script, or no worker.
        RunError: a rank failed.
        KeyboardInterrupt: SIGINT or SIGTERM came.
    """
    _check(script, workers, threads)
    store = host_store()
    command = [sys.executable, str(script), *arguments]
    news = dist.PrefixStore(PREFIX, store)
    company = _Company(command, workers, threads, store.port)
    try:
        with asked_to_stop(_interrupt):
            company.start_workers()
            while company.running():
                if not company.has_servers and news.check([SERVERS_KEY]):
                    company.start_servers(int(news.get(SERVERS_KEY)))
                time.sleep(_LOOK_EVERY_S)
            failure = company.failure()
            if failure is not None:
                culprit = int(news.get(FAILED_KEY)) if news.check([FAILED_KEY]) else failure
                raise RunError(company.describe(culprit))
    finally:
        company.end()


def _check(script: str | Path, workers: int, threads: int | None) -> None:
    if not Path(script).is_file():
        raise RequestError(f"there is no script {script}: give the path of a Python file")
    for what, number in (("workers", workers), ("threads", 1 if threads is None else threads)):
        if number < 1:
            raise RequestError(f"{what} must be at least 1 (given {number})")


def _interrupt() -> None:
    raise KeyboardInterrupt


class _Company:
    """The processes of a run.

    Args:
        command: what every rank runs.
        workers: how many.
        threads: of a worker, or None.
        port: of the store.
    """

    def __init__(self, command: list[str], workers: int, threads: int | None, port: int) -> None:
        self.has_servers = False
        self._command = [sys.executable, "-I", "-S", tethered.__file__, str(os.getpid()), *command]
        self._workers = workers
        self._threads = threads
        self._port = port
        self._ranks: list[_Rank] = []

    def start_workers(self) -> None:
        given = None if self._threads is None else str(self._threads)
        shared = os.environ.get("OMP_NUM_THREADS", str(max(1, available_cores() // self._workers)))
        for rank in range(self._workers):
            self._start(f"worker {rank}", rank, self._workers, given or shared)

    def start_servers(self, count: int) -> None:
        self.has_servers = True
        size = self._workers + count
        for number in range(count):
            self._start(f"server {number}", self._workers + number, size, "1")

    def running(self) -> bool:
        """Whether any rank is, and none has failed."""
        statuses = [rank.process.poll() for rank in self._ranks]
        return None in statuses and not any(statuses)

    def failure(self) -> int | None:
        """Gives the rank that failed first, as far as can be seen; waits a while for others to say what they saw."""
        failed = [number for number, rank in enumerate(self._ranks) if rank.process.poll()]
        if not failed:
            return None
        self._wait(_GRACE_S)
        # One that was killed had no time to notice anything, so the others noticed it.
        return min(failed, key=lambda number: self._ranks[number].process.returncode)

    def describe(self, number: int) -> str:
        """Says how a rank has left."""
        status = self._ranks[number].process.poll()
        if status is None:
            return f"{self._ranks[number].name} raised an error and did not leave"
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"left with status {status}"
        return f"{self._ranks[number].name} {how}"

    def end(self) -> None:
        """Ends whoever is left: by asking, then by killing."""
        try:
            self._signal(signal.SIGTERM)
            self._wait(_GRACE_S)
        finally:  # a second SIGINT cuts the asking short
            self._signal(signal.SIGKILL)
            self._wait(None)

    def _start(self, name: str, rank: int, size: int, threads: str) -> None:
        local = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        group = {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
        store = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": self._port}
        agent = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        ours = {WORKERS_VARIABLE: self._workers, "OMP_NUM_THREADS": threads}
        variables = {key: str(value) for key, value in (local | group | store | agent | ours).items()}
        # In groups of their own: the terminal's SIGINT reaches this process alone, which then ends them in order.
        process = subprocess.Popen(
            self._command, env=os.environ | variables, stdin=subprocess.DEVNULL, process_group=0
        )
        self._ranks.append(_Rank(f"{name} (rank {rank})", process))

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            if rank.process.poll() is None:
                rank.process.send_signal(number)

    def _wait(self, patience_s: float | None) -> None:
        deadline = None if patience_s is None else time.monotonic() + patience_s
        for rank in self._ranks:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                rank.process.wait(left)
            except subprocess.TimeoutExpired:
                return

"""The processes of a script's run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed.rendezvous import LOOPBACK
from polyrhythm.launch import tethered
from polyrhythm.launch.devices import available_cores
from polyrhythm.launch.script.meeting import INCARNATION_VARIABLE, RETURNS_VARIABLE, WORKERS_VARIABLE

LAST_WORDS_S = 3.0
"""How long ranks may take to say what they saw after another has failed."""
GRACE_S = 3.0
"""How long they may take to leave when asked."""


@dataclass(frozen=True)
class ScriptRank:
    """A rank's process.

    Attributes:
        name: for people.
        peer: which rank, and how many processes have had it before.
        process: of the rank.
    """

    name: str
    peer: Peer
    process: subprocess.Popen[bytes]

    @property
    def failed(self) -> bool:
        """Whether it has left, and not well."""
        return bool(self.process.poll())

    @property
    def was_killed(self) -> bool:
        """Whether a signal has ended it."""
        return (self.process.poll() or 0) < 0

    @property
    def end(self) -> str:
        """How it has left, in words."""
        status = self.process.poll()
        if status is None:
            return f"{self.name} raised an error and did not leave"
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"left with status {status}"
        return f"{self.name} {how}"


class ScriptRanks:
    """Starts and ends them.

    Args:
        command: what every rank runs.
        workers: how many.
        threads: of a worker, or None.
        port: of the store.
        leader_returns: whether worker 0 is started again when it is lost.

    Attributes:
        workers: how many.
        there: those that count: a lost one that the others go on without is left out.
    """

    def __init__(
        self,
        command: list[str],
        workers: int,
        threads: int | None,
        port: int,
        *,
        leader_returns: bool = False,
    ) -> None:
        self.workers = workers
        self.there: list[ScriptRank] = []
        self._command = [sys.executable, "-I", "-S", tethered.__file__, str(os.getpid()), *command]
        self._servers = 0
        self._port = port
        self._leader_returns = leader_returns
        shared = os.environ.get("OMP_NUM_THREADS", str(max(1, available_cores() // workers)))
        self._threads = shared if threads is None else str(threads)

    def start_workers(self) -> None:
        """Starts all workers."""
        for rank in range(self.workers):
            self.start(Peer(rank, 0))

    def start_servers(self, count: int) -> None:
        """Starts so many servers."""
        self._servers = count
        for number in range(count):
            self.start(Peer(self.workers + number, 0))

    def start(self, peer: Peer) -> None:
        """Starts a process."""
        works = peer.rank < self.workers
        role = f"worker {peer.rank}" if works else f"server {peer.rank - self.workers}"
        size = self.workers if works else self.workers + self._servers
        local = {"RANK": peer.rank, "WORLD_SIZE": size, "LOCAL_RANK": peer.rank, "LOCAL_WORLD_SIZE": size}
        group = {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
        store = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": self._port}
        agent = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        ours = {
            WORKERS_VARIABLE: self.workers,
            INCARNATION_VARIABLE: peer.incarnation,
            RETURNS_VARIABLE: int(self._leader_returns),
        }
        threads = {"OMP_NUM_THREADS": self._threads if works else "1"}
        variables = local | group | store | agent | ours | threads
        # In groups of their own: the terminal's SIGINT reaches this process alone, which then ends them in order.
        process = subprocess.Popen(
            self._command,
            env=os.environ | {key: str(value) for key, value in variables.items()},
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        self.there.append(ScriptRank(f"{role} (rank {peer.rank})", peer, process))

    def forget(self, rank: ScriptRank) -> None:
        """Does without one that is gone."""
        self.there.remove(rank)

    def wait(self, patience_s: float | None) -> None:
        """Waits until all have left, or for so long."""
        deadline = None if patience_s is None else time.monotonic() + patience_s
        for rank in self.there:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                rank.process.wait(left)
            except subprocess.TimeoutExpired:
                return

    def end(self) -> None:
        """Ends whoever is left: by asking, then by killing."""
        try:
            self._signal(signal.SIGTERM)
            self.wait(GRACE_S)
        finally:  # a second SIGINT cuts the asking short
            self._signal(signal.SIGKILL)
            self.wait(None)

    def _signal(self, number: signal.Signals) -> None:
        for rank in self.there:
            if rank.process.poll() is None:
                rank.process.send_signal(number)

"""`polyrhythm run`: a user's script as the ranks of a run, all on this host, under a launcher's watch.

launcher                        worker 0 … N-1               server N … N+S-1
host the store
start the workers ────────────▶ script … join(strategy)
◀──── S, by way of the store ── (worker 0)
start the servers ──────────────────────────────────────────▶ script … join(strategy): serve, leave
wait for all, and see which losses the run survives

a rank is killed that can be spared ─▶ the others are told ─▶ they go on ─▶ pause ─▶ a successor, under the same rank
any other, or one with an error     ─▶ the others may say what they saw ─▶ the run has failed
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed.rendezvous import (
    PREFIX,
    host_store,
    tell_of_loss,
    tell_of_start,
)
from polyrhythm.errors import RequestError, RunError
from polyrhythm.launch.script import ranks as script_ranks
from polyrhythm.launch.script.meeting import (
    ADMITS_KEY,
    FAILED_KEY,
    LET_GO_KEY,
    LOSS_TOLERANCE_KEY,
    OVER_KEY,
    SERVERS_KEY,
    WHOLE_KEY,
    LossTolerance,
    Place,
    Places,
    begun_key,
)
from polyrhythm.launch.script.ranks import ScriptRank, ScriptRanks
from polyrhythm.launch.signals import asked_to_stop
from polyrhythm.launch.succession import Succession
from polyrhythm.roles.world import LEADER

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


_NOT_SAID = (
    "its place stays empty, since the loop does not say where it is: write `for epoch in group.epochs(n)`"
)

_NEVER_JOINED = (
    "the script has ended without calling polyrhythm.join: unless it shares its work out otherwise, each of its "
    "{workers} processes did all of it; see `with polyrhythm.join(strategy) as group`"
)


class ScriptWatch:
    """Watches a run.

    Args:
        ranks: its processes.
        store: where they meet.
        restarts: how many successors of lost ranks there may be.
    """

    def __init__(self, ranks: ScriptRanks, store: Any, restarts: int) -> None:
        self._ranks = ranks
        self._store = store
        self._restarts = restarts
        self._succession = Succession(restarts)
        self._places = Places(store, ranks.workers)
        self._places.begin()
        self._tolerance: LossTolerance | None = None
        self._absent: dict[int, Peer] = {}

    def poll(self) -> bool:
        """Handles what has happened since the last call; gives whether the run goes on."""
        if self._tolerance is None and self._store.check([SERVERS_KEY]):
            self._tolerance = LossTolerance.from_text(self._read(LOSS_TOLERANCE_KEY))
            self._ranks.start_servers(int(self._read(SERVERS_KEY)))
        over = self._is_over()
        if over:
            self._see_off()
        for rank in [rank for rank in self._ranks.there if rank.failed]:
            if not self._can_be_spared(rank):
                return False
            self._handle_loss(rank)
        if not over:
            for peer in self._succession.take_due(time.monotonic()):
                tell_of_start(self._store, peer)  # to another that is started just then
                self._ranks.start(peer)
                self._tell_newcomer(peer)
        return bool(self._succession.awaited) or any(
            rank.process.poll() is None for rank in self._ranks.there
        )

    def raise_failure(self) -> None:
        """Raises the error of a run that has failed.

        Raises:
            RunError: a rank has failed.
        """
        if not any(rank.failed for rank in self._ranks.there):
            if not self._store.check([SERVERS_KEY]):
                _say(_NEVER_JOINED.format(workers=self._ranks.workers))
            return
        culprits = [rank for rank in self._ranks.there if rank.failed]
        if not (self._others_wait and any(rank.peer.rank == LEADER for rank in culprits)):
            self._ranks.wait(script_ranks.LAST_WORDS_S)  # others may say what they saw
            culprits = [rank for rank in self._ranks.there if rank.failed]
        if self._store.check([FAILED_KEY]):
            named = int(self._read(FAILED_KEY))
            culprits = [rank for rank in self._ranks.there if rank.peer.rank == named] or culprits
        # One that was killed had no time to notice anything, so the others noticed it.
        culprit = min(culprits, key=lambda rank: rank.process.returncode or 0)
        why = self._tolerance.why_not if self._tolerance is not None and culprit.was_killed else ""
        of_worker = why and culprit.peer.rank < self._ranks.workers
        raise RunError(f"{culprit.end}; {why}" if of_worker else culprit.end)

    def _can_be_spared(self, rank: ScriptRank) -> bool:
        """Whether the run goes on without a rank; what the script says to be wrong would be wrong with a successor."""
        if not (rank.was_killed or self._is_set(LET_GO_KEY, rank.peer)):
            return False
        self._note_whole_servers()
        if rank.peer.rank == LEADER and not (rank.was_killed and self._leader_returns):
            return False
        servers = [absent for absent in self._absent if absent >= self._ranks.workers]
        spared = self._tolerance is not None and self._tolerance.tolerates(rank.peer.rank, servers)
        return spared and not self._store.check([FAILED_KEY])

    @property
    def _others_wait(self) -> bool:
        """Whether the others would wait for a successor of worker 0, and have nothing to say of its end."""
        return self._tolerance is not None and self._tolerance.spares_leader and self._restarts > 0

    @property
    def _leader_returns(self) -> bool:
        """Whether a successor of worker 0 would find all that it needs."""
        begun = self._store.check([begun_key(LEADER), ADMITS_KEY]) and not self._read(ADMITS_KEY)
        return bool(begun) and self._succession.left > 0 and not self._is_over()

    def _handle_loss(self, rank: ScriptRank) -> None:
        if rank.peer.rank == LEADER:
            self._start_over()
        self._ranks.forget(rank)
        peer = rank.peer
        self._absent[peer.rank] = peer
        for other in self._ranks.there:
            tell_of_loss(self._store, peer, other.peer)
        if peer.rank >= self._ranks.workers:
            _say(f"{rank.end}; who has its shards as well goes on with them{self._then(peer)}")
        else:
            then = self._then(peer)
            coming = peer.rank in self._succession.awaited
            self._places.set(peer.rank, Place.COMING if coming else Place.GONE)
            awaited = peer.rank == LEADER and self._tolerance is not None and self._tolerance.waits
            _say(f"{rank.end}; the others {'wait for its successor' if awaited else 'go on'}{then}")

    def _start_over(self) -> None:
        """Starts those again who wait to be let in by worker 0: its successor cannot know how far that has come."""
        for rank in list(self._ranks.there):
            if rank.peer.rank < self._ranks.workers and self._places.of(rank.peer.rank) is Place.WAITING:
                rank.process.kill()
                rank.process.wait()
                self._succession.left += 1  # it has done nothing wrong
                self._handle_loss(rank)

    def _then(self, peer: Peer) -> str:
        """Lets a successor come, if there may be one; says so."""
        if not self._succession.left or self._is_over():
            return ""
        if peer.rank < self._ranks.workers:
            reason = self._read(ADMITS_KEY) if self._store.check([ADMITS_KEY]) else _NOT_SAID
            if reason:
                return f"; {reason}"
        awaited = peer.rank == LEADER and self._tolerance is not None and self._tolerance.waits
        pause_s = self._succession.lose(peer, time.monotonic(), awaited=awaited)
        used = f"{self._restarts - self._succession.left} of {self._restarts}"
        when = f"in {pause_s:g} s" if pause_s else "at once"
        return f", and it is started again {when} (restart {used})"

    def _tell_newcomer(self, newcomer: Peer) -> None:
        """Tells a newcomer of those whom it would look for in vain; a server counts once it has its shards."""
        if newcomer.rank < self._ranks.workers:
            self._absent.pop(newcomer.rank, None)
        self._note_whole_servers()
        for absent in self._absent.values():
            if absent.rank != newcomer.rank:
                tell_of_loss(self._store, absent, newcomer)

    def _note_whole_servers(self) -> None:
        """Strikes those off the absent whose successors have their shards."""
        for absent in list(self._absent.values()):
            if self._is_set(WHOLE_KEY, Peer(absent.rank, absent.incarnation + 1)):
                del self._absent[absent.rank]

    def _is_set(self, key: str, peer: Peer) -> bool:
        return bool(self._store.check([f"{key}/{peer.rank}/{peer.incarnation}"]))

    def _is_over(self) -> bool:
        led = [rank for rank in self._ranks.there if rank.peer.rank == LEADER]
        return any(rank.process.poll() == 0 for rank in led) or bool(self._store.check([OVER_KEY]))

    def _see_off(self) -> None:
        """Ends successors that have come too late to take part, and forgets those that have found nobody."""
        self._succession.cancel()
        for rank in [
            rank for rank in self._ranks.there if rank.peer.incarnation and not self._takes_part(rank)
        ]:
            rank.process.kill()
            rank.process.wait()
            self._ranks.forget(rank)

    def _takes_part(self, rank: ScriptRank) -> bool:
        if rank.peer.rank < self._ranks.workers:
            return self._places.of(rank.peer.rank) in (Place.HERE, Place.BEHIND)
        return self._is_set(WHOLE_KEY, rank.peer)

    def _read(self, key: str) -> str:
        return bytes(self._store.get(key)).decode()


def _say(text: str) -> None:
    print(f"polyrhythm: {text}", file=sys.stderr, flush=True)

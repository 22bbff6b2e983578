"""The launcher's watch over its ranks: passes their events on, replaces workers that die, and explains failures.

worker dies ─▶ word to the others ─▶ they go on ─▶ pause ─▶ a successor starts, under the same rank
any other   ─▶ the others may say what they saw ─▶ the run has failed
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from polyrhythm.communication.transports.torch_distributed.links import tell_of_loss
from polyrhythm.errors import RequestError, RunError
from polyrhythm.events import Event, Notice, WorkerJoined, from_json
from polyrhythm.launch.child import BUG, PEER, REQUEST, RUN
from polyrhythm.launch.ranks import Child, Ranks
from polyrhythm.launch.signals import held_back
from polyrhythm.launch.succession import Succession
from polyrhythm.launch.watchdog import cause_of_loss
from polyrhythm.roles.job import Job
from polyrhythm.roles.world import LEADER, StopWish, goes_on_without
from polyrhythm.strategies.cast import Cast

_GRACE_S = 2.0
"""How long the others may take to say what they saw, once a rank has failed."""


class Watch:
    """Watches a run.

    Args:
        ranks: its processes.
        job: what they train.
        cast: who does what.
        stop: whether someone wants the run to stop.
        emit: takes the run's events.
    """

    def __init__(
        self, ranks: Ranks, job: Job, cast: Cast, stop: StopWish, emit: Callable[[Event], None]
    ) -> None:
        self._ranks = ranks
        self._job = job
        self._cast = cast
        self._stop = stop
        self._emit = emit
        self._succession = Succession(job.losses.restarts)
        self._time_s = 0.0
        self._give_up_at: float | None = None

    def run(self, store: Any) -> None:
        """Returns when all have left.

        Args:
            store: where the ranks meet.

        Raises:
            RequestError: a rank found the request wrong.
            RunError: a rank failed or died.
        """
        while any(child.open for child in self._ranks.children) or self._succession.next_s() is not None:
            patience_s = self._patience_s()
            ready = wait([child.pipe for child in self._ranks.children if child.open], patience_s)
            if not ready and self._give_up_at is not None:
                break
            for child in self._ranks.children:
                if child.pipe in ready:
                    self._hear(child)
            self._deal_with_failures(store)
        failed = [child for child in self._ranks.children if child.failed]
        if failed:
            raise verdict(failed, self._ranks, self._job)

    def _patience_s(self) -> float | None:
        until = self._succession.next_s() if self._give_up_at is None else self._give_up_at
        return None if until is None else max(0.0, until - time.monotonic())

    def _hear(self, child: Child) -> None:
        try:
            record = json.loads(child.pipe.recv_bytes())
        except (EOFError, OSError):  # the child has left
            child.process.join()
            child.open = False
            child.failed |= child.process.exitcode != 0
            return
        if "event" not in record:
            child.error, child.kind, child.failed = record["error"], record["kind"], True
            return
        event = from_json(record["event"])
        if isinstance(event, Notice) and child.rank != LEADER:  # whose clock began when training did
            event = replace(event, time_s=self._time_s)
        self._time_s = event.time_s
        if isinstance(event, WorkerJoined):
            self._newest(event.rank).joined = True
        self._emit(event)

    def _deal_with_failures(self, store: Any) -> None:
        children = self._ranks.children
        self._learn_causes(store)
        over = any(child.rank == LEADER and not child.open and not child.failed for child in children)
        if self._give_up_at is None and any(
            child.failed and not self._can_be_spared(child) for child in children
        ):
            self._give_up_at = time.monotonic() + _GRACE_S
        if self._give_up_at is not None:
            return
        for child in [child for child in children if child.failed and not child.open]:
            children.remove(child)
            if not over:
                self._bear_the_loss(child, store)
        if over or self._stop.wished:
            self._succession.cancel()
        if over:  # who came too late waits for an answer of nobody
            for child in [child for child in children if child.open and self._is_late(child)]:
                self._ranks.kill(child)
        for peer in self._succession.take_due(time.monotonic()):
            with held_back():  # by the child, until it knows what to do then
                self._ranks.start(peer)
            if self._stop.wished:
                self._ranks.signal(signal.SIGTERM)

    def _learn_causes(self, store: Any) -> None:
        for child in self._ranks.children:
            if child.failed and not child.open:
                child.cause = child.cause or cause_of_loss(store, child.peer)

    def _bear_the_loss(self, child: Child, store: Any) -> None:
        for other in self._ranks.children:
            if other.open:
                tell_of_loss(store, child.peer, other.peer)
        pause_s = None if self._stop.wished else self._succession.lose(child.peer, time.monotonic())
        used = f"{self._job.losses.restarts - self._succession.left} of {self._job.losses.restarts}"
        then = "" if pause_s is None else f", and it is started again in {pause_s:g} s (restart {used})"
        text = f"{self._ranks.name(child.rank)} {child.death}; the others go on{then}"
        self._emit(Notice(time_s=self._time_s, text=text))
        living = sum(other.open and other.rank in self._cast.workers for other in self._ranks.children)
        if (
            pause_s is None and living < self._job.losses.min_workers
        ):  # the leader may not know of all that died
            self._stop.wish()
            self._ranks.signal(signal.SIGTERM)

    def _can_be_spared(self, child: Child) -> bool:
        """Whether the run goes on without it; what it says to be wrong with itself would be wrong with a successor."""
        return child.kind in ("", PEER) and goes_on_without(child.rank, self._cast, self._job.strategy)

    def _is_late(self, child: Child) -> bool:
        return child.peer.incarnation > 0 and not child.joined

    def _newest(self, rank: int) -> Child:
        return max(
            (child for child in self._ranks.children if child.rank == rank), key=lambda child: child.peer
        )


def verdict(failed: list[Child], ranks: Ranks, job: Job) -> Exception:
    """Chooses the failure that explains the others: a lost peer is only an echo of one."""
    folder = f" {job.keeping.folder}" if job.keeping.folder is not None else ""
    for child in failed:
        if child.kind == REQUEST:
            return RequestError(child.error)
    for child in failed:  # one that was killed could not say so, and the others' collectives broke
        if not child.kind and child.process.exitcode is not None:
            return RunError(f"{ranks.name(child.rank)} {child.death}; continue with --resume{folder}")
    for child in failed:
        if child.kind in (RUN, BUG):
            return RunError(f"{ranks.name(child.rank)}: {child.error}")
    assert failed[0].kind == PEER
    return RunError(f"{ranks.name(failed[0].rank)}: {failed[0].error}")

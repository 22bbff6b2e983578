"""The launcher of local ranks: passes their events on, replaces those that die, ends a run that failed.

a rank dies that can be spared ─▶ the others are told ─▶ they go on ─▶ pause ─▶ a successor, under the same rank
                                                └─▶ no restart left: a worker's place is vacant, and may be taken by
                                                    a worker that joins by hand
any other                      ─▶ the others may say what they saw ─▶ the run has failed: `verdict`

`verdict` chooses the failure that explains the others: a lost peer is only a consequence of one.
"""

from __future__ import annotations

import json
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from multiprocessing.connection import wait
from typing import Any

from polyrhythm.communication.secret import NONCE_BYTES
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed.rendezvous import (
    LOOPBACK,
    host_store,
    tell_of_loss,
    tell_of_start,
)
from polyrhythm.errors import RequestError, RunError
from polyrhythm.events import Event, Notice, RunEnded, RunStarted, ServerJoined, WorkerJoined, from_json
from polyrhythm.launch.children.ranks import BUG, PEER, REQUEST, RUN, Child, MeetingPoint, Ranks
from polyrhythm.launch.children.restarting import RankLost
from polyrhythm.launch.devices import available_cores, threads_for_worker
from polyrhythm.launch.joining.connections import LOOPBACK as JOIN_LOOPBACK
from polyrhythm.launch.joining.connections import Address
from polyrhythm.launch.joining.join_server import Entrance, Guests, Inside
from polyrhythm.launch.signals import Preemption, asked_to_stop, held_back
from polyrhythm.launch.succession import Absences, Succession
from polyrhythm.launch.watchdog import cause_of_loss
from polyrhythm.roles.job import Job
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.world import LEADER, StopRequest
from polyrhythm.strategies.role_assignment import cast_in_order


def run_local(
    job: Job,
    emit: Callable[[Event], None],
    *,
    port: int = 0,
    threads: int | None = None,
    start_method: str = "fork",
    entrance: Entrance | None = None,
) -> bool:
    """Runs a job on this host, one process a rank; returns when it is over.

    Args:
        job: what to train.
        emit: takes the run's events.
        port: of the store, on the loopback interface; 0 picks a free one.
        threads: compute threads of each worker; None shares the cores out.
        start_method: `fork` (quick, data shared; only from a process that has not computed on several threads)
            or `spawn`.
        entrance: lets others join; None: nobody can.

    Returns:
        Whether it was preempted.

    Raises:
        RequestError: the port is in use, a rank found the request wrong, or the job cannot be sent to ranks.
        RunError: a rank failed or died, and the others could not go on.
        Preempted: the notice ran out before everything was written.
    """
    cast = cast_in_order(job.workers, job.traits.servers)
    threads = threads or threads_for_worker(available_cores(), job.workers - job.losses.vacant, job.strategy)
    ranks = Ranks(job, cast, threads, start_method)
    stop, preemption = StopRequest(), Preemption(job.losses.notice_s)
    vacant = cast.workers[job.workers - job.losses.vacant :]

    def ask() -> None:
        stop.request()
        ranks.signal(signal.SIGTERM)
        if entrance is not None:
            entrance.ask_to_stop()

    try:
        with asked_to_stop(ask, preemption.begin):
            with held_back():  # by the children, until they know what to do then
                for rank in sorted(set(range(cast.size)) - set(vacant)):
                    ranks.start(Peer(rank, 0))
            if stop.requested:  # when there were only some of them
                ask()
            store = host_store(port)  # after the children were forked: they must not inherit its thread
            ranks.open_at(_meeting_point(store.port, entrance))
            watch = Watch(ranks, stop, emit, preemption)
            if entrance is not None:
                watch.open(entrance, store, [Peer(rank, 0) for rank in vacant])
            watch.run(store)
    finally:
        with held_back():  # somebody impatient may interrupt again
            ranks.end()
            if entrance is not None:
                entrance.close()
    return preemption.begun


def _meeting_point(port: int, entrance: Entrance | None) -> MeetingPoint:
    if entrance is None:
        return MeetingPoint(port, LOOPBACK, secrets.token_bytes(NONCE_BYTES))
    return MeetingPoint(port, entrance.address.host, entrance.link_key)


_LOOK_EVERY_S = 0.1
_GRACE_S = 2.0
"""How long the others may take to say what they saw, once a rank has failed."""


class Watch:
    """Watches a run.

    Args:
        ranks: its processes.
        stop: whether someone wants the run to stop.
        emit: takes the run's events.
        preemption: of this host.
    """

    def __init__(
        self, ranks: Ranks, stop: StopRequest, emit: Callable[[Event], None], preemption: Preemption
    ) -> None:
        self._ranks = ranks
        self._job = ranks.job
        self._cast = ranks.cast
        self._stop = stop
        self._emit = emit
        self._preemption = preemption
        self._how_to_join = ""
        self._ledger = Ledger.of(ranks.job.workers)
        self._recovery = Recovery(ranks, stop, self._ledger, self._say)
        self._time_s = 0.0
        self._ended_for_want_of_workers: RunError | None = None
        self._give_up_at: float | None = None

    def open(self, entrance: Entrance, store: Any, vacant: list[Peer]) -> None:
        """Lets others join from now on.

        Args:
            entrance: how they come in.
            store: where the ranks meet.
            vacant: places that nobody has.
        """
        door = entrance.open()
        for peer in vacant:
            door.vacate(peer)
            self._recovery.tell_of_loss(peer, store)
        door.open(Inside(Address(JOIN_LOOPBACK, store.port), self._cast))
        self._how_to_join = entrance.how
        self._recovery.guests = Guests(
            door,
            self._ranks.name,
            self._say,
            tell_of_loss=lambda peer: self._recovery.tell_of_loss(peer, store),
            welcome=lambda peer: self._recovery.welcome(peer, store),
        )

    def run(self, store: Any) -> None:
        """Returns when all have left.

        Args:
            store: where the ranks meet.

        Raises:
            RequestError: a rank found the request wrong.
            RunError: a rank failed or died.
        """
        while (
            any(child.open for child in self._ranks.children)
            or self._recovery.succession.next_s() is not None
        ):
            patience_s = self._patience_s()
            doors = () if self._recovery.guests is None else (self._recovery.guests.door,)
            ready = wait([*(child.pipe for child in self._ranks.children if child.open), *doors], patience_s)
            self._preemption.check(self._resume)
            if self._recovery.guests is not None:
                self._recovery.guests.look()
            if not ready and self._give_up_at is not None and time.monotonic() >= self._give_up_at:
                break
            for child in self._ranks.children:
                if child.pipe in ready:
                    self._hear(child)
            self._deal_with_failures(store)
        if self._recovery.guests is not None:
            self._recovery.guests.see_off(wait)
        failed = [child for child in self._ranks.children if child.failed]
        if failed:
            error = verdict(failed, self._ranks, self._job, others_lost=self._recovery.absences.any_yet)
            if isinstance(error, RankLost) and self._stop.requested:  # nobody wants it to be started again
                raise RunError(str(error))
            raise error
        if self._ended_for_want_of_workers is not None:
            raise self._ended_for_want_of_workers

    def _patience_s(self) -> float | None:
        until = self._recovery.succession.next_s() if self._give_up_at is None else self._give_up_at
        patience_s = inf if until is None else max(0.0, until - time.monotonic())
        if self._preemption.is_possible:  # a signal does not end the wait
            patience_s = min(patience_s, _LOOK_EVERY_S)
        return None if patience_s == inf else patience_s

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
        self._ledger.note(event, time.perf_counter())
        if isinstance(event, WorkerJoined | ServerJoined):
            self._recovery.absences.fill(event.rank)
            for newest in self._newest(event.rank):
                newest.joined = True
        if isinstance(event, RunEnded):
            self._recovery.ended = True
            if self._recovery.guests is not None:
                self._recovery.guests.sum_up()
            if event.outcome == "interrupted" and self._recovery.too_few is not None:
                # It has failed, as is said when all have left: the leader has stopped because it was told to.
                self._ended_for_want_of_workers = self._recovery.too_few
                return
        self._emit(event)
        if isinstance(event, RunStarted) and self._recovery.guests is not None:
            self._recovery.guests.door.begin(parameters=event.parameters)
            self._say(self._how_to_join)

    def _deal_with_failures(self, store: Any) -> None:
        # The leader's successor comes first.
        children = sorted(self._ranks.children, key=lambda child: child.rank)
        self._learn_causes(store)
        leaders = [child for child in children if child.rank == LEADER]
        over = any(not child.open and (self._recovery.ended or not child.failed) for child in leaders)
        if self._give_up_at is None and any(
            child.failed and not self._recovery.can_be_spared(child) for child in children
        ):
            self._give_up_at = time.monotonic() + _GRACE_S
        if self._give_up_at is not None:
            return
        for child in [child for child in children if child.failed and not child.open]:
            self._ranks.children.remove(child)
            if not over:
                self._recovery.handle_loss(child, store)
        if over or self._stop.requested:
            self._recovery.succession.cancel(spare=None if over else LEADER)  # which the others wait for
        if over:  # who came too late waits for an answer of nobody
            for child in [child for child in self._ranks.children if child.open and self._is_late(child)]:
                self._ranks.kill(child)
        self._recovery.start_successors(store)

    def _learn_causes(self, store: Any) -> None:
        for child in self._ranks.children:
            if child.failed and not child.open:
                child.cause = child.cause or cause_of_loss(store, child.peer)

    def _is_late(self, child: Child) -> bool:
        return child.peer.incarnation > 0 and not child.joined

    def _newest(self, rank: int) -> list[Child]:
        """Gives the newest process of a rank; nothing if it is a guest's."""
        return sorted(
            (child for child in self._ranks.children if child.rank == rank), key=lambda child: child.peer
        )[-1:]

    def _say(self, text: str) -> None:
        self._emit(Notice(time_s=self._time_s, text=text))

    @property
    def _resume(self) -> str:
        folder = self._job.keeping.folder
        return "continue with --resume" + ("" if folder is None else f" {folder}")


class Recovery:
    """Handles the losses of a run's processes for its launcher.

    Args:
        ranks: the processes of the run.
        stop: whether someone wants the run to stop.
        ledger: of the run so far, which its keeper goes on with.
        say: tells people.

    Attributes:
        guests: those who joined by hand, once they can.
        absences: who is gone.
        succession: who is to be started again.
        ended: whether the leader has said its last word.
        too_few: the error of a run that was made to stop since too few workers are left.
    """

    def __init__(self, ranks: Ranks, stop: StopRequest, ledger: Ledger, say: Callable[[str], None]) -> None:
        self.guests: Guests | None = None
        self.absences = Absences(ranks.cast)
        self.succession = Succession(ranks.job.losses.restarts)
        self.ended = False
        self.too_few: RunError | None = None
        self._ranks = ranks
        self._job = ranks.job
        self._cast = ranks.cast
        self._stop = stop
        self._ledger = ledger
        self._say = say

    def start_successors(self, store: Any) -> None:
        """Starts who is due.

        Args:
            store: where the ranks meet.
        """
        for peer in self.succession.take_due(time.monotonic()):
            # A guest that has not heard of this one must be heard of by it, and the reverse.
            tell_of_start(store, peer)
            if self.guests is not None:
                self.guests.look()
            guests = () if self.guests is None else self.guests.present
            with held_back():  # by the child, until it knows what to do then
                self._ranks.start(peer, guests, self._ledger if peer.rank == LEADER else None)
            self.welcome(peer, store)
            if self._stop.requested:
                self._ranks.signal(signal.SIGTERM)

    def handle_loss(self, child: Child, store: Any) -> None:
        """Tells the others of a loss, and people; the successor is due after a pause, if there is one.

        Args:
            child: who is lost.
            store: where the ranks meet.
        """
        self.tell_of_loss(child.peer, store)
        awaited = child.rank == LEADER and self._job.faults.regroups
        pause_s = None
        if not self._stop.requested:
            pause_s = self.succession.lose(child.peer, time.monotonic(), awaited=awaited)
        used = f"{self._job.losses.restarts - self.succession.left} of {self._job.losses.restarts}"
        when = f"in {pause_s:g} s" if pause_s else "at once"
        then = "" if pause_s is None else f", and it is started again {when} (restart {used})"
        if child.rank in self._cast.servers:
            held = "who has its shards as well goes on with them"
            self._say(f"{self._ranks.name(child.rank)} {child.death}; {held}{then}")
            return
        if pause_s is None and self.guests is not None:
            self.guests.door.vacate(child.peer)
            then = ", and its place is vacant for who joins"
        others = "the others wait for its successor" if awaited else "the others go on"
        self._say(f"{self._ranks.name(child.rank)} {child.death}; {others}{then}")
        if pause_s is None and self._left < self._job.losses.min_workers:
            # The leader may not know of all that died.
            self._end_for_want_of_workers()

    @property
    def _left(self) -> int:
        """How many workers are there, or have done all that was theirs."""
        workers = [child for child in self._ranks.children if child.rank in self._cast.workers]
        guests = 0 if self.guests is None else len(self.guests.present)
        return sum(child.open or not child.failed for child in workers) + guests

    def _end_for_want_of_workers(self) -> None:
        if self.too_few is not None or not self._stop.requested:  # else people have asked for it
            self.too_few = self._job.too_few(self._left)
        self._stop.request()
        self._ranks.signal(signal.SIGTERM)

    def can_be_spared(self, child: Child) -> bool:
        """Whether the run goes on without it; what it says to be wrong with itself would be wrong with a successor."""
        if child.rank == LEADER and (child.kind or self.ended):
            return self.ended  # whose last word was of a run that is over
        spared = self._job.faults.survives(
            child.rank, self._cast, self.absences.servers, leader_returns=self._leader_returns
        )
        return child.kind in ("", PEER) and spared

    def welcome(self, newcomer: Peer, store: Any) -> None:
        """Tells a newcomer of those whom it would look for in vain."""
        if newcomer.rank in self._cast.workers:  # a server counts once it has its shards
            self.absences.fill(newcomer.rank)
        for lost in self.absences.news_for(newcomer):
            tell_of_loss(store, lost, newcomer)

    def tell_of_loss(self, lost: Peer, store: Any) -> None:
        """Tells all who are there that one is gone, or a place vacant."""
        self.absences.lose(lost)
        guests = set() if self.guests is None else self.guests.present
        for other in {child.peer for child in self._ranks.children if child.open} | guests:
            tell_of_loss(store, lost, other)

    @property
    def _leader_returns(self) -> bool:
        """Whether a successor of the leader would find all that it needs."""
        holders = self._cast.servers or self._cast.workers
        others = [child for child in self._ranks.children if child.rank in holders and child.rank != LEADER]
        all_there = all(child.open or child.failed for child in others)  # not one has been let go
        return self._ledger.began and all_there and self.succession.left > 0 and not self._stop.requested


def verdict(failed: list[Child], ranks: Ranks, job: Job, *, others_lost: bool = False) -> Exception:
    """Chooses the failure that explains the others: a lost peer is only an echo of one.

    Args:
        failed: ranks of the run.
        ranks: all of them.
        job: of the run.
        others_lost: whether others were lost before, which may have been too many.
    """
    folder = f" {job.keeping.folder}" if job.keeping.folder is not None else ""
    for child in failed:
        if child.kind == REQUEST:
            return RequestError(child.error)
    for child in failed:  # one that was killed could not say so, and the others' collectives broke
        if not child.kind and child.process.exitcode is not None:
            return RankLost(f"{ranks.name(child.rank)} {child.death}", f"continue with --resume{folder}")
    for child in failed:
        if child.kind in (RUN, BUG):
            return RunError(f"{ranks.name(child.rank)}: {child.error}")
    assert failed[0].kind == PEER
    if others_lost:
        return RankLost(f"{ranks.name(failed[0].rank)}: {failed[0].error}", f"continue with --resume{folder}")
    return RunError(f"{ranks.name(failed[0].rank)}: {failed[0].error}")

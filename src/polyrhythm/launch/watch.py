"""The launcher's watch over its ranks: passes their events on, replaces workers that die, and explains failures.

a rank dies that can be spared ─▶ word to the others ─▶ they go on ─▶ pause ─▶ a successor, under the same rank
                                                └─▶ no restart left: a worker's place is vacant, for who joins by hand
any other   ─▶ the others may say what they saw ─▶ the run has failed
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from multiprocessing.connection import wait
from typing import Any

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed.link_words import tell_of_loss, tell_of_start
from polyrhythm.errors import RequestError, RunError
from polyrhythm.events import (
    Event,
    Notice,
    RunEnded,
    RunStarted,
    ServerJoined,
    WorkerJoined,
    from_json,
)
from polyrhythm.launch.absences import Absences
from polyrhythm.launch.child import BUG, PEER, REQUEST, RUN
from polyrhythm.launch.joining.address import LOOPBACK, Address
from polyrhythm.launch.joining.door import Inside
from polyrhythm.launch.joining.entrance import Entrance
from polyrhythm.launch.joining.guests import Guests
from polyrhythm.launch.preemption import Preemption
from polyrhythm.launch.ranks import Child, Ranks
from polyrhythm.launch.restarting import RankLost
from polyrhythm.launch.signals import held_back
from polyrhythm.launch.succession import Succession
from polyrhythm.launch.watchdog import cause_of_loss
from polyrhythm.roles.job import Job
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.world import LEADER, StopWish, goes_on_without

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
        self, ranks: Ranks, stop: StopWish, emit: Callable[[Event], None], preemption: Preemption
    ) -> None:
        self._ranks = ranks
        self._job = ranks.job
        self._cast = ranks.cast
        self._stop = stop
        self._emit = emit
        self._preemption = preemption
        self._guests: Guests | None = None
        self._how_to_join = ""
        self._succession = Succession(ranks.job.losses.restarts)
        self._absences = Absences(ranks.cast)
        self._ledger = Ledger.of(ranks.job.workers)
        self._ended = False
        self._time_s = 0.0
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
            self._tell_of_loss(peer, store)
        door.open(Inside(Address(LOOPBACK, store.port), self._cast))
        self._how_to_join = entrance.how
        self._guests = Guests(
            door,
            self._ranks.name,
            self._say,
            tell_of_loss=lambda peer: self._tell_of_loss(peer, store),
            welcome=lambda peer: self._welcome(peer, store),
        )

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
            doors = () if self._guests is None else (self._guests.door,)
            ready = wait([*(child.pipe for child in self._ranks.children if child.open), *doors], patience_s)
            self._preemption.check(self._resume)
            if self._guests is not None:
                self._guests.look()
            if not ready and self._give_up_at is not None and time.monotonic() >= self._give_up_at:
                break
            for child in self._ranks.children:
                if child.pipe in ready:
                    self._hear(child)
            self._deal_with_failures(store)
        if self._guests is not None:
            self._guests.see_off(wait)
        failed = [child for child in self._ranks.children if child.failed]
        if failed:
            error = verdict(failed, self._ranks, self._job, borne=self._absences.any_yet)
            if isinstance(error, RankLost) and self._stop.wished:  # nobody wants it to be started again
                raise RunError(str(error))
            raise error

    def _patience_s(self) -> float | None:
        until = self._succession.next_s() if self._give_up_at is None else self._give_up_at
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
            self._absences.fill(event.rank)
            for newest in self._newest(event.rank):
                newest.joined = True
        if isinstance(event, RunEnded):
            self._ended = True
            if self._guests is not None:
                self._guests.sum_up()
        self._emit(event)
        if isinstance(event, RunStarted) and self._guests is not None:
            self._guests.door.begin(parameters=event.parameters)
            self._say(self._how_to_join)

    def _deal_with_failures(self, store: Any) -> None:
        children = sorted(
            self._ranks.children, key=lambda child: child.rank
        )  # the leader's successor comes first
        self._learn_causes(store)
        leaders = [child for child in children if child.rank == LEADER]
        over = any(not child.open and (self._ended or not child.failed) for child in leaders)
        if self._give_up_at is None and any(
            child.failed and not self._can_be_spared(child) for child in children
        ):
            self._give_up_at = time.monotonic() + _GRACE_S
        if self._give_up_at is not None:
            return
        for child in [child for child in children if child.failed and not child.open]:
            self._ranks.children.remove(child)
            if not over:
                self._bear_the_loss(child, store)
        if over or self._stop.wished:
            self._succession.cancel(spare=None if over else LEADER)  # which the others wait for
        if over:  # who came too late waits for an answer of nobody
            for child in [child for child in self._ranks.children if child.open and self._is_late(child)]:
                self._ranks.kill(child)
        self._start_successors(store)

    def _start_successors(self, store: Any) -> None:
        for peer in self._succession.take_due(time.monotonic()):
            # A guest that has not heard of this one must be heard of by it, and the reverse.
            tell_of_start(store, peer)
            if self._guests is not None:
                self._guests.look()
            guests = () if self._guests is None else self._guests.present
            with held_back():  # by the child, until it knows what to do then
                self._ranks.start(peer, guests, self._ledger if peer.rank == LEADER else None)
            self._welcome(peer, store)
            if self._stop.wished:
                self._ranks.signal(signal.SIGTERM)

    def _learn_causes(self, store: Any) -> None:
        for child in self._ranks.children:
            if child.failed and not child.open:
                child.cause = child.cause or cause_of_loss(store, child.peer)

    def _bear_the_loss(self, child: Child, store: Any) -> None:
        self._tell_of_loss(child.peer, store)
        awaited = child.rank == LEADER and self._job.strategy.regroups(self._job.workers)
        pause_s = None
        if not self._stop.wished:
            pause_s = self._succession.lose(child.peer, time.monotonic(), awaited=awaited)
        used = f"{self._job.losses.restarts - self._succession.left} of {self._job.losses.restarts}"
        when = f"in {pause_s:g} s" if pause_s else "at once"
        then = "" if pause_s is None else f", and it is started again {when} (restart {used})"
        if child.rank in self._cast.servers:
            held = "who has its shards as well goes on with them"
            self._say(f"{self._ranks.name(child.rank)} {child.death}; {held}{then}")
            return
        if pause_s is None and self._guests is not None:
            self._guests.door.vacate(child.peer)
            then = ", and its place is vacant for who joins"
        others = "the others wait for its successor" if awaited else "the others go on"
        self._say(f"{self._ranks.name(child.rank)} {child.death}; {others}{then}")
        living = sum(other.open and other.rank in self._cast.workers for other in self._ranks.children)
        living += 0 if self._guests is None else len(self._guests.present)
        if (
            pause_s is None and living < self._job.losses.min_workers
        ):  # the leader may not know of all that died
            self._stop.wish()
            self._ranks.signal(signal.SIGTERM)

    def _can_be_spared(self, child: Child) -> bool:
        """Whether the run goes on without it; what it says to be wrong with itself would be wrong with a successor."""
        if child.rank == LEADER and (child.kind or self._ended):
            return self._ended  # whose last word was of a run that is over
        spared = goes_on_without(
            child.rank,
            self._cast,
            self._job.strategy,
            self._absences.servers,
            leader_returns=self._leader_returns,
        )
        return child.kind in ("", PEER) and spared

    @property
    def _leader_returns(self) -> bool:
        """Whether a successor of the leader would find all that it needs."""
        holders = self._cast.servers or self._cast.workers
        others = [child for child in self._ranks.children if child.rank in holders and child.rank != LEADER]
        all_there = all(child.open or child.failed for child in others)  # not one has been let go
        return self._ledger.began and all_there and self._succession.left > 0 and not self._stop.wished

    def _is_late(self, child: Child) -> bool:
        return child.peer.incarnation > 0 and not child.joined

    def _newest(self, rank: int) -> list[Child]:
        """Gives the newest process of a rank; nothing if it is a guest's."""
        return sorted(
            (child for child in self._ranks.children if child.rank == rank), key=lambda child: child.peer
        )[-1:]

    def _welcome(self, newcomer: Peer, store: Any) -> None:
        """Tells a newcomer of those whom it would look for in vain."""
        if newcomer.rank in self._cast.workers:  # a server counts once it has its shards
            self._absences.fill(newcomer.rank)
        for lost in self._absences.news_for(newcomer):
            tell_of_loss(store, lost, newcomer)

    def _tell_of_loss(self, lost: Peer, store: Any) -> None:
        self._absences.lose(lost)
        guests = set() if self._guests is None else self._guests.present
        for other in {child.peer for child in self._ranks.children if child.open} | guests:
            tell_of_loss(store, lost, other)

    def _say(self, text: str) -> None:
        self._emit(Notice(time_s=self._time_s, text=text))

    @property
    def _resume(self) -> str:
        folder = self._job.keeping.folder
        return "continue with --resume" + ("" if folder is None else f" {folder}")


def verdict(failed: list[Child], ranks: Ranks, job: Job, *, borne: bool = False) -> Exception:
    """Chooses the failure that explains the others: a lost peer is only an echo of one.

    Args:
        failed: ranks of the run.
        ranks: all of them.
        job: of the run.
        borne: whether others were lost before, which may have been too many.
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
    if borne:
        return RankLost(f"{ranks.name(failed[0].rank)}: {failed[0].error}", f"continue with --resume{folder}")
    return RunError(f"{ranks.name(failed[0].rank)}: {failed[0].error}")

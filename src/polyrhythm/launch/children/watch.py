"""The launcher's watch over its ranks: passes their events on, has those that die replaced, and ends a run that failed.

a rank dies that can be spared ─▶ `Recovery`: the others go on
any other                      ─▶ the others may say what they saw ─▶ the run has failed: `verdict`
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from multiprocessing.connection import wait
from typing import Any

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.errors import RunError
from polyrhythm.events import (
    Event,
    Notice,
    RunEnded,
    RunStarted,
    ServerJoined,
    WorkerJoined,
    from_json,
)
from polyrhythm.launch.causes_of_loss import cause_of_loss
from polyrhythm.launch.children.ranks import Child, Ranks
from polyrhythm.launch.children.recovery import Recovery
from polyrhythm.launch.children.restarting import RankLost
from polyrhythm.launch.children.verdict import verdict
from polyrhythm.launch.joining.address import LOOPBACK, Address
from polyrhythm.launch.joining.door import Inside
from polyrhythm.launch.joining.entrance import Entrance
from polyrhythm.launch.joining.guests import Guests
from polyrhythm.launch.preemption import Preemption
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.world import LEADER, StopRequest

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
        door.open(Inside(Address(LOOPBACK, store.port), self._cast))
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

"""The leader of a rehearsal: lets successors in, collects accounts, and makes the run's figures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from polyrhythm.communication.message import Kind, Message, unpack_json
from polyrhythm.errors import PeerLost
from polyrhythm.events import (
    Event,
    Notice,
    RunEnded,
    RunStarted,
    ServerJoined,
    ServerLost,
    WorkerJoined,
    WorkerLost,
    WorkerProgress,
    WorkerTimings,
    from_json,
)
from polyrhythm.roles.keeping.worker_state import Account
from polyrhythm.roles.leader_channel import TAG
from polyrhythm.roles.leading.stragglers import Stragglers
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.regrouping.assembly import Assembly
from polyrhythm.roles.regrouping.regroup import Regroup
from polyrhythm.roles.rehearsing.last_words import LastWords
from polyrhythm.roles.rehearsing.rehearsal import Rehearsal
from polyrhythm.roles.server_attendance import ServerAttendance
from polyrhythm.roles.world import LEADER, World


class RehearsalLeader:
    """Emits events, and waits for everyone's last words; see `RehearsalCoordinator`. Whoever is lost is not waited for.

    Args:
        rehearsal: what is rehearsed.
        world: where this rank is.

    Attributes:
        attendance: of the workers.
        formations: how this worker gets the next formation.
    """

    def __init__(self, rehearsal: Rehearsal, world: World) -> None:
        self._rehearsal = rehearsal
        self._world = world
        self._control = world.control()
        self._accounts: dict[int, Account] = {}
        self._reports: dict[int, dict[str, Any]] = {}
        self._ledger = world.ledger or Ledger.of(len(world.cast.workers))
        self.attendance = self._ledger.attendance
        self._stragglers = Stragglers()
        self._servers = ServerAttendance(world.cast.servers, rehearsal.strategy, self._ledger.servers)
        self._started_at = world.clock.now()
        self._assembly = Assembly(world, rehearsal.strategy, self)
        self._reform: Callable[[], None] | None = None
        self._leads = False
        self.formations = self._assembly

    def wait_with(self, regroup: Regroup) -> None:
        """Sets what regroups while this worker waits here for others."""
        self._reform = regroup.reform

    def recovers_from(self, loss: PeerLost) -> bool:
        """Never: this is the leader."""
        return False

    def ask_to_enter(self) -> None:
        """Leads the others, as a successor."""
        assert self._ledger.began_at_s is not None, "a leader has a successor when training has started"
        self._started_at = self._ledger.began_at_s
        self._take_over()

    def read(self) -> None:
        """Takes what has arrived."""
        while self._hear(wait=False):
            pass

    def read_until(self, enough: Callable[[], bool]) -> None:
        """Takes what arrives until there is enough."""
        while not enough():
            self._hear(wait=True)

    def is_final(self, worker: int) -> bool:
        """Whether a worker has handed in its account."""
        return self._world.cast.workers[worker] in self._accounts

    def send_if_there(self, rank: int, message: Message) -> None:
        """Sends, unless that rank is lost."""
        with suppress(PeerLost):  # as will be heard
            self._control.send(rank, message)

    def begin(self, step: int) -> None:
        """Says that the run has started, unless it is a successor."""
        rehearsal, world = self._rehearsal, self._world
        if self._ledger.began_at_s is not None:
            if not self._leads:
                self.ask_to_enter()
            return
        self._started_at = world.clock.now()
        world.emit(
            RunStarted(
                time_s=0,
                strategy=str(rehearsal.strategy),
                data=rehearsal.data,
                model=rehearsal.model,
                workers=len(world.cast.workers),
                servers=len(world.cast.servers),
                epochs=rehearsal.epochs,
                steps_per_epoch=rehearsal.steps_per_epoch,
                parameters=rehearsal.sizes.parameters,
                free_running=not rehearsal.strategy.waits_for_slower(rehearsal.workers),
            )
        )
        if remark := rehearsal.strategy.remark(rehearsal.workers):
            world.emit(Notice(time_s=0, text=remark))

    def _take_over(self) -> None:
        self._leads = True
        incarnation = self._world.incarnation
        self._see(LEADER, LEADER, incarnation)
        for rank in range(1, self._world.network.size):
            self.send_if_there(rank, Message(Kind.LEAD, version=incarnation, tag=TAG))

    def progress(self, event: WorkerProgress | WorkerTimings) -> None:
        """Notes what it has done, and reads what others have."""
        self._note(event)
        self.read()

    def end(self, account: Account, let_go: Callable[[], None]) -> None:
        """Waits for the others' last words, lets all leave, and says what the run has come to."""
        self._accounts[LEADER] = account
        while self._awaits_workers():
            if self._reform is not None and self._assembly.muster.due:
                self._reform()
            else:
                self._hear(wait=True)
        let_go()
        self.read_until(lambda: all(rank in self._reports for rank in self._servers.present))
        self._let_leave()
        seconds = self._world.clock.now() - self._started_at
        words = LastWords(
            [self._accounts[rank] for rank in sorted(self._accounts)],
            [self._reports[rank] for rank in sorted(self._reports)],
            self.attendance,
            self._servers.losses,
        )
        outcome = "interrupted" if any(entry.stopped for entry in words.accounts) else "done"
        self._world.emit(
            RunEnded(time_s=seconds, outcome=outcome, result=words.figures(self._rehearsal, seconds))
        )

    def _let_leave(self) -> None:
        if self._world.goes_on_without(LEADER, self._rehearsal.strategy):
            for rank in self._accounts:
                if rank != LEADER:
                    self.send_if_there(rank, Message(Kind.LEAVE, tag=TAG))

    def _awaits_workers(self) -> bool:
        # Whoever has handed in its account stays present; a count, since thousands hand theirs in one by one.
        return len(self._accounts) < len(self.attendance.present)

    def _hear(self, *, wait: bool) -> bool:
        """Takes a message of another rank; gives whether there was one, or news of a loss."""
        try:
            found = self._control.receive() if wait else self._control.poll()
        except PeerLost as loss:
            if loss.rank in self._accounts:
                self._assembly.left.add(self._world.cast.workers.index(loss.rank))
            elif loss.rank not in self._reports:
                if not self._world.goes_on_without(loss.rank, self._rehearsal.strategy):
                    raise
                self._strike_off(loss.rank)
            return True
        if found is not None:
            self._take(*found)
        return found is not None

    def _strike_off(self, rank: int) -> None:
        if rank in self._world.cast.servers:
            if self._servers.lose(rank):
                text = f"{self._servers.name(rank)} is lost; who has kept its shard goes on with it"
                self._say(ServerLost(time_s=0, text=text, rank=rank))
            return
        worker = self._world.cast.workers.index(rank)
        if worker in self.attendance.present:
            step = self.attendance.lose(worker)
            self._assembly.muster.lose(worker)
            self._say(WorkerLost(time_s=0, worker=worker, rank=rank, step=step))

    def _take(self, source: int, message: Message) -> None:
        if source in self._world.cast.servers and message.kind is Kind.JOIN:
            self._servers.losses.join(source)
            text = f"{self._servers.name(source)} is there again, and has its shards from its neighbours"
            self._say(ServerJoined(time_s=0, text=text, rank=source))
            return
        if message.kind is Kind.LEAD:
            self._see(source, self._world.cast.workers.index(source), message.version)
            return
        if message.kind in (Kind.JOIN, Kind.BROKEN):
            self._let_regroup(source, message)
            return
        assert message.tensor is not None, "every other control message carries a payload"
        told = unpack_json(message.tensor)
        if message.kind is Kind.REPORT:
            self._reports[source] = told
        elif message.kind is Kind.STATE:
            self._accounts[source] = Account(**told)
            self._see(source, self._accounts[source].worker)
        else:
            event = from_json(told)
            if isinstance(event, WorkerProgress):
                self._see(source, event.worker)
            self._note(event)

    def _note(self, event: Event) -> None:
        self._world.emit(event)
        if isinstance(event, WorkerProgress):
            self.attendance.note(event)
            if news := self._stragglers.on_progress(event):
                self._world.emit(news)

    def _let_regroup(self, rank: int, message: Message) -> None:
        worker = self._world.cast.workers.index(rank)
        if message.kind is Kind.BROKEN:
            self._assembly.muster.on_message(worker, message)
            return
        self._see(rank, worker)
        self._assembly.muster.enter(worker, message.version)

    def _see(self, rank: int, worker: int, incarnation: int = 0) -> None:
        """Notes that a worker is there: a successor says so by its first word. Who came before it must be lost."""
        while self.attendance.losses(worker) < incarnation:
            step = self.attendance.lose(worker)
            self._say(WorkerLost(time_s=0, worker=worker, rank=rank, step=step))
        if worker not in self.attendance.present:
            self.attendance.join(worker)
            self._say(WorkerJoined(time_s=0, worker=worker, rank=rank))

    def _say(self, event: Event) -> None:
        self._world.emit(replace(event, time_s=self._world.clock.now() - self._started_at))

"""Where the workers of a rehearsal report: to the leader, who makes the run's figures of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.message import Kind, Message, pack_json, unpack_json
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
from polyrhythm.roles.leading.stragglers import Stragglers
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.line import TAG, Line
from polyrhythm.roles.regrouping.assembly import Assembly
from polyrhythm.roles.regrouping.member_side import MemberSide
from polyrhythm.roles.regrouping.regroup import Regroup, Side
from polyrhythm.roles.rehearsing.rehearsal import Rehearsal
from polyrhythm.roles.result import bytes_per_step, defence_figures, staleness_figures
from polyrhythm.roles.server_attendance import ServerAttendance
from polyrhythm.roles.world import LEADER, World


class RehearsalDesk(Protocol):
    """What a worker has to say."""

    @property
    def side(self) -> Side:
        """How this worker comes to the next formation."""

    def wait_with(self, regroup: Regroup) -> None:
        """Lets workers regroup while this one waits for others here."""

    def bears(self, loss: PeerLost) -> bool:
        """Waits until another leads, if it is the leader that is lost, and that is borne; gives whether it is."""

    def ask_to_enter(self) -> None:
        """It is a successor among workers that go in step, or leads them."""

    def begin(self, step: int) -> None:
        """It starts, at this step."""

    def progress(self, event: WorkerProgress | WorkerTimings) -> None:
        """It has done some steps."""

    def end(self, account: Account, let_go: Callable[[], None]) -> None:
        """It has left; `let_go` lets the servers go, which is the leader's to do once all have."""


def rehearsal_desk(rehearsal: Rehearsal, world: World) -> RehearsalDesk:
    """Gives a worker its desk."""
    return _Leader(rehearsal, world) if world.leads else _Mail(rehearsal, world)


class _Mail:
    """Everything goes to the leader by message."""

    def __init__(self, rehearsal: Rehearsal, world: World) -> None:
        self._line = Line(world, rehearsal.strategy)
        self._control = self._line.control
        self._incarnation = world.incarnation
        self._last: Message | None = None
        self._leaving: list[Handle] = []  # a few a worker; a send whose handle is dropped may never arrive
        self._regroup: Regroup | None = None
        self.side = MemberSide(self._line, world.incarnation)

    def wait_with(self, regroup: Regroup) -> None:
        self._regroup = regroup
        self._line.first = self._introduction

    def bears(self, loss: PeerLost) -> bool:
        return self._line.bears_loss(loss)

    def ask_to_enter(self) -> None:
        self._control.send(LEADER, Message(Kind.JOIN, version=self._incarnation))

    def begin(self, step: int) -> None:
        """Says that it is there when a new leader asks."""
        self._line.first = self._introduction

    def progress(self, event: WorkerProgress | WorkerTimings) -> None:
        message = Message(Kind.EVENT, pack_json(event.to_json()))
        if self._line.bears:
            self._line.look()
            self._line.send(message)
            return
        # Not waited for: what the strategy is sending goes first, and the next step may begin meanwhile.
        self._leaving.append(self._control.start_send(LEADER, message))

    def end(self, account: Account, let_go: Callable[[], None]) -> None:
        for sending in self._leaving:  # the last words are shorter, and might be there first
            sending.wait()
        self._last = Message(Kind.STATE, pack_json(vars(account)))
        self._line.send(self._last)
        if self._regroup is None:
            self._line.await_leave()
            return
        if self._line.leader > self._regroup.leader:  # it said so while there was nothing to hand on
            self._regroup.mend()
        self._line.await_leave(self._regroup.mend)

    def _introduction(self) -> list[Message]:
        here = Message(Kind.LEAD, version=self._incarnation)
        return [here] if self._last is None else [here, self._last]


class _Leader:
    """Emits events, and waits for everyone's last words. Whoever is lost is not waited for."""

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
        self._assembly = Assembly(world, self._rehearsal.strategy, self)
        self._mend: Callable[[], None] | None = None
        self._leads = False
        self.side = self._assembly

    def wait_with(self, regroup: Regroup) -> None:
        self._mend = regroup.mend

    def bears(self, loss: PeerLost) -> bool:
        """Never: this is the leader."""
        return False

    def ask_to_enter(self) -> None:
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
        self._note(event)
        self.read()

    def end(self, account: Account, let_go: Callable[[], None]) -> None:
        self._accounts[LEADER] = account
        while self._awaits_workers():
            if self._mend is not None and self._assembly.muster.due:
                self._mend()
            else:
                self._hear(wait=True)
        let_go()
        self.read_until(lambda: all(rank in self._reports for rank in self._servers.present))
        self._let_leave()
        seconds = self._world.clock.now() - self._started_at
        accounts = [self._accounts[rank] for rank in sorted(self._accounts)]
        outcome = "interrupted" if any(entry.stopped for entry in accounts) else "done"
        self._world.emit(RunEnded(time_s=seconds, outcome=outcome, result=self._figures(accounts, seconds)))

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
            if news := self._stragglers.hear(event):
                self._world.emit(news)

    def _let_regroup(self, rank: int, message: Message) -> None:
        worker = self._world.cast.workers.index(rank)
        if message.kind is Kind.BROKEN:
            self._assembly.muster.hear(worker, message)
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

    def _figures(self, accounts: list[Account], seconds: float) -> dict[str, Any]:
        rehearsal = self._rehearsal
        reports = [self._reports[rank] for rank in sorted(self._reports)]
        steps, length = accounts[0].step, rehearsal.steps_per_epoch
        attendance = self.attendance
        images = sum(account.session_images for account in accounts) + attendance.images_of_lost
        return {
            "run": None,
            "strategy": str(rehearsal.strategy),
            "data": rehearsal.data,
            "model": rehearsal.model,
            "workers": rehearsal.workers,
            "servers": len(self._world.cast.servers),
            "steps": steps,
            "epochs": steps // length if steps % length == 0 else round(steps / length, 3),
            "seconds": seconds,
            "images_per_s": images / seconds if seconds > 0 else 0.0,
            "train_loss": None,
            "test_loss": None,
            "test_top1": None,
            "test_top5": None,
            "workers_lost": attendance.lost,
            "workers_joined": attendance.joined,
            "servers_lost": self._servers.losses.lost,
            "servers_joined": self._servers.losses.joined,
            "bytes_sent_per_step": bytes_per_step(accounts, reports, attendance.steps_of_lost),
            "staleness": staleness_figures(accounts, reports),
            **defence_figures(reports),
            "parameters_sha256": None,
        }

"""A worker of a dry run: its steps, and how it reaches the leader, or leads itself.

    training     begin ─▶ forward, backward of a network ─▶ gradients_ready ─▶ …  ─▶ test, save
    dry run      begin ─▶ the time that both would take  ─▶ gradients_ready ─▶ …

The loop is that of `roles/trainer.py`, with a model that weighs nothing (`DryWorkload`). The strategy's parts
run unchanged, on a `StandIn` for the model (see `roles/dry_run.py`); servers run
`roles/server.py`. The leader admits successors, collects the accounts of all workers and the last reports of
all ranks, and makes the run's figures from them; other workers reach it by messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, repeat
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.message import Kind, Message, pack_json, unpack_json
from polyrhythm.errors import PeerLost
from polyrhythm.events import (
    CacheUsed,
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
from polyrhythm.roles.dry_run import Rehearsal
from polyrhythm.roles.keeping.worker_state import Account, WorkerState
from polyrhythm.roles.leader_channel import TAG, LeaderChannel
from polyrhythm.roles.leading.stragglers import Stragglers
from polyrhythm.roles.ledger import Attendance, Ledger, ServerAttendance, ServerLosses
from polyrhythm.roles.regrouping.regroup import FormationSource, Regroup, RemoteFormations
from polyrhythm.roles.regrouping.regroup_coordinator import Assembly
from polyrhythm.roles.replica import FlatReplica
from polyrhythm.roles.result import bytes_per_step, defence_figures, staleness_figures
from polyrhythm.roles.step_metrics import Tally
from polyrhythm.roles.trainer import Trainer, TrainingRun
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.strategy import Remarks
from polyrhythm.strategies.worker_part import Step, WorkerCalls, WorkerSetting

_NO_LOSS = float("nan")


class DryBatch(NamedTuple):
    """A batch that is only counted; see `Batch`."""

    size: int


class DryWorkload:
    """A model that weighs nothing; see `ComputedWorkload`.

    Args:
        rehearsal: what is run dry.
        world: where this rank is; its pace must be a drawn one, since nothing is computed.

    Attributes:
        replica: a few numbers that stand for the model.
        batch_size: images of a full batch.
        rate_ratio: 1.
        report_steps: after how many steps a report is due.
        calendar: which step belongs to which epoch.
    """

    rate_ratio = 1.0

    def __init__(self, rehearsal: Rehearsal, world: World) -> None:
        assert world.pace is not None, (
            "nothing is computed here, so the pace must draw the time that it takes"
        )
        flat = rehearsal.stand_in.flat(still=rehearsal.still)
        setting = WorkerSetting(
            world.network,
            world.workers(),
            world.cast,
            flat,
            rehearsal.plan(flat),
            rehearsal.steps,
            rehearsal.sizes.head,
            rehearsal.batch_size,
            world.rejoins,
            world.incarnation,
            world.leader_returns,
        )
        self.replica = FlatReplica(rehearsal.strategy, world, setting, announce=True)
        self.batch_size = rehearsal.batch_size
        self.report_steps = rehearsal.steps_per_report
        self.calendar = DryCalendar(rehearsal)
        self._worker = self.replica.workers.rank
        self._rehearsal = rehearsal
        # Asked for at every step of thousands of workers.
        self._pace, self._timer = world.pace, world.timer
        self._gradient = None if rehearsal.still else rehearsal.gradient
        self._shares = self.replica.pass_shares(rehearsal.sizes.shares)
        self._use, self._announce = self.replica.use, self.replica.announce
        self._computed = _NO_LOSS, rehearsal.learning_rate, True

    def share_out(self, place: int, present: int) -> None:
        """Continue with the same batches: the loss of a worker does not make the others' steps longer."""

    def share_out_apart(self, absent: tuple[int, ...], place: int, present: int) -> None:
        """Continue with the same batches."""

    def batches(self, epoch: int, start: int) -> Iterator[DryBatch]:
        """Return this worker's batches of an epoch, from step `start` of it on."""
        rehearsal = self._rehearsal
        if not rehearsal.epoch_images:
            return repeat(DryBatch(rehearsal.batch_size))
        return (DryBatch(rehearsal.images(self._worker, step)) for step in count(start))

    def compute(self, step: Step, batch: DryBatch) -> tuple[float, float, bool]:
        """Let the time of a step pass; its gradients are those of the dry run, mostly zeros."""
        if batch.size:
            self._pace.forward(self._shares, self._use)
            if self._gradient is not None:
                self._gradient(self._worker, step.number, self.replica.flat.gradients)
            self._pace.backward(self._shares, self._announce)
            if self._timer is not None:
                self._timer.lap("backward")
        return self._computed

    def record(self, account: Account) -> WorkerState:
        """Return the account: there is no model, and nothing is learned."""
        return WorkerState(replace(account, epoch_images=0, epoch_loss=0.0), {}, {}, {})

    def cache_use(self) -> None:
        """There are no images."""


class DryCalendar:
    """The epochs of a dry run, the last one perhaps not whole; see `Calendar`.

    Args:
        rehearsal: what is run dry.

    Attributes:
        epochs: of the run.
        total_steps: that every worker takes.
    """

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.epochs = rehearsal.epochs
        self.total_steps = rehearsal.steps
        self._length = rehearsal.steps_per_epoch

    def start(self, epoch: int) -> int:
        """Return the steps before an epoch; before the one after the last, all."""
        return min(epoch * self._length, self.total_steps)

    def epoch_of(self, step: int) -> int:
        """Return the epoch that a step belongs to; how many epochs there are, if it is beyond the end."""
        return self.epochs if step >= self.total_steps else step // self._length


def rehearse(rehearsal: Rehearsal, world: World) -> None:
    """Take all steps of one worker of a dry run, or fewer if a rank is asked to stop.

    Args:
        rehearsal: what is run dry.
        world: where this rank is; its pace must be a drawn one, since nothing is computed. The leader emits the events
            and figures of the run.
    """
    if rehearsal.timings:
        world = world.timed()
    workload = DryWorkload(rehearsal, world)
    coordinator = rehearsal_coordinator(rehearsal, world)
    trainer = Trainer(world, rehearsal.strategy, workload, coordinator)
    if trainer.let_in:
        coordinator.ask_to_enter()
    start = trainer.open(0)
    # All ranks of a dry run that may have successors share one clock, which began with the run.
    elapsed_s = world.clock.now() if world.rejoins else 0.0
    first = None
    if start:  # a successor says at once that it is there
        epoch, rate = workload.calendar.epoch_of(start - 1), rehearsal.learning_rate
        first = Tally(trainer.worker, world.clock).say(epoch, start, rate)
        first = replace(first, time_s=elapsed_s)
    reached = _DryCoordinator(coordinator, workload.replica.part, first)
    in_step = rehearsal.traits.lockstep
    TrainingRun(trainer, workload, reached, world, in_step=in_step).run(start, elapsed_s)


class _DryCoordinator:
    """Leaves out what a dry run has no use for: tests, and states beside accounts; see `Coordinator`."""

    def __init__(
        self, coordinator: RehearsalCoordinator, part: WorkerCalls, first: WorkerProgress | None
    ) -> None:
        self._coordinator = coordinator
        self._part = part
        self._first = first
        self.formations = coordinator.formations
        self.wait_with = coordinator.wait_with
        self.recovers_from = coordinator.recovers_from

    def begin(self, epoch: int) -> None:
        self._coordinator.begin(epoch)
        if self._first is not None:
            self._coordinator.progress(self._first)

    def entered(self, state: WorkerState) -> None:
        pass

    def step_done(self) -> None:
        pass

    def progress(self, event: WorkerProgress | WorkerTimings | CacheUsed) -> None:
        assert not isinstance(event, CacheUsed), "there are no images"
        self._coordinator.progress(event)

    def epoch_done(self, epoch: int, state: WorkerState, presented: Tensor | None) -> None:
        pass

    def interrupted(self, state: WorkerState) -> None:
        pass

    def end(self, state: WorkerState) -> None:
        self._coordinator.end(state.account, self._part.let_go)


class RehearsalCoordinator(Protocol):
    """As `roles.worker.Coordinator`, without models: `RehearsalLeader`, or a stand-in that sends it messages."""

    @property
    def formations(self) -> FormationSource:
        """How this worker gets the next formation."""

    def wait_with(self, regroup: Regroup) -> None:
        """Sets what regroups while this worker waits here for others."""

    def recovers_from(self, loss: PeerLost) -> bool:
        """Waits for a new leader, if the lost rank led and the run survives that; gives whether it does."""

    def ask_to_enter(self) -> None:
        """Asks, as a successor, to be let in where workers go in step; on rank 0, takes the lead over."""

    def begin(self, step: int) -> None:
        """Called when this worker starts, at this step."""

    def progress(self, event: WorkerProgress | WorkerTimings) -> None:
        """Passes a report of the latest steps on."""

    def end(self, account: Account, let_go: Callable[[], None]) -> None:
        """Called when this worker has left.

        Args:
            account: what it has done.
            let_go: lets the servers go; called by the leader once all workers have left.
        """


def rehearsal_coordinator(rehearsal: Rehearsal, world: World) -> RehearsalCoordinator:
    """Makes a worker's coordinator."""
    return RehearsalLeader(rehearsal, world) if world.leads else RemoteRehearsalLeader(rehearsal, world)


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
        self._servers = ServerAttendance(world.cast.servers, rehearsal.faults, self._ledger.servers)
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
                free_running=not rehearsal.traits.waits_for_slower,
            )
        )
        strategy = rehearsal.strategy
        if isinstance(strategy, Remarks) and (remark := strategy.remark(rehearsal.workers)):
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
        if self._world.goes_on_without(LEADER, self._rehearsal.faults):
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
                if not self._world.goes_on_without(loss.rank, self._rehearsal.faults):
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


@dataclass(frozen=True)
class LastWords:
    """The last words.

    Attributes:
        accounts: of the workers, in the order of their ranks.
        reports: of the servers, likewise.
        attendance: of the workers.
        losses: of servers.
    """

    accounts: list[Account]
    reports: list[dict[str, Any]]
    attendance: Attendance
    losses: ServerLosses

    def figures(self, rehearsal: Rehearsal, seconds: float) -> dict[str, Any]:
        """Gives the figures of the run, as `train --json` prints them; what only training tells is None.

        Args:
            rehearsal: what was rehearsed.
            seconds: that it took.
        """
        accounts, attendance = self.accounts, self.attendance
        steps, length = accounts[0].step, rehearsal.steps_per_epoch
        images = sum(account.session_images for account in accounts) + attendance.images_of_lost
        return {
            "run": None,
            "strategy": str(rehearsal.strategy),
            "data": rehearsal.data,
            "model": rehearsal.model,
            "workers": rehearsal.workers,
            "servers": rehearsal.traits.servers,
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
            "servers_lost": self.losses.lost,
            "servers_joined": self.losses.joined,
            "bytes_sent_per_step": bytes_per_step(accounts, self.reports, attendance.steps_of_lost),
            "staleness": staleness_figures(accounts, self.reports),
            **defence_figures(self.reports),
            "parameters_sha256": None,
        }


class RemoteRehearsalLeader:
    """Everything goes to the leader by message; see `RehearsalCoordinator`.

    Args:
        rehearsal: what is rehearsed.
        world: where this rank is.

    Attributes:
        formations: how this worker gets the next formation.
    """

    def __init__(self, rehearsal: Rehearsal, world: World) -> None:
        self._channel = LeaderChannel(world, rehearsal.strategy)
        self._control = self._channel.control
        self._incarnation = world.incarnation
        self._last: Message | None = None
        self._leaving: list[Handle] = []  # a few a worker; a send whose handle is dropped may never arrive
        self._regroup: Regroup | None = None
        self.formations = RemoteFormations(self._channel, world.incarnation)

    def wait_with(self, regroup: Regroup) -> None:
        """Sets what regroups while this worker waits here for others."""
        self._regroup = regroup
        self._channel.introduction = self._introduction

    def recovers_from(self, loss: PeerLost) -> bool:
        """Waits for a new leader, if the lost rank led and the run survives that; gives whether it does."""
        return self._channel.recovers_from(loss)

    def ask_to_enter(self) -> None:
        """Says that it is a successor."""
        self._control.send(LEADER, Message(Kind.JOIN, version=self._incarnation))

    def begin(self, step: int) -> None:
        """Says that it is there when a new leader asks."""
        self._channel.introduction = self._introduction

    def progress(self, event: WorkerProgress | WorkerTimings) -> None:
        """Sends what it has done."""
        message = Message(Kind.EVENT, pack_json(event.to_json()))
        if self._channel.survives_leader:
            self._channel.check()
            self._channel.send(message)
            return
        # Not waited for: what the strategy is sending goes first, and the next step may begin meanwhile.
        self._leaving.append(self._control.start_send(LEADER, message))

    def end(self, account: Account, let_go: Callable[[], None]) -> None:
        """Sends its last words, and waits until the leader needs nothing more of it."""
        for sending in self._leaving:  # the last words are shorter, and might be there first
            sending.wait()
        self._last = Message(Kind.STATE, pack_json(vars(account)))
        self._channel.send(self._last)
        if self._regroup is None:
            self._channel.await_leave()
            return
        if self._channel.leader > self._regroup.leader:  # it announced itself before there was a last message
            self._regroup.reform()
        self._channel.await_leave(self._regroup.reform)

    def _introduction(self) -> list[Message]:
        here = Message(Kind.LEAD, version=self._incarnation)
        return [here] if self._last is None else [here, self._last]

"""A worker of a dry run: its steps, and how it reaches the leader, or leads itself.

    training     begin ─▶ forward, backward of a network ─▶ gradients_ready ─▶ …  ─▶ test, save
    dry run      begin ─▶ the time that both would take  ─▶ gradients_ready ─▶ …

The loop is that of `roles/trainer.py`, with a model that weighs nothing (`DryWorkload`). The strategy's parts
run unchanged, on a `StandIn` for the model (see `roles/dry_run.py`); servers run `roles/server.py`.

`DryDuties` is what the leader does for a dry run: it emits the run's events, and makes its figures of the
workers' accounts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, repeat
from typing import Any

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.data.balance import split
from polyrhythm.data.dealer import Grant
from polyrhythm.events import Event, Notice, RunEnded, RunStarted
from polyrhythm.partition.ownership import dry_division
from polyrhythm.roles.balance import balancer_for
from polyrhythm.roles.checkpointing.worker_state import WorkerState
from polyrhythm.roles.control_messages import Account
from polyrhythm.roles.control_plane import ControlPlane
from polyrhythm.roles.deal import Deal, Hand, deal_communicator
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.roles.leading.leader import Duties, EventEmitter, Leader
from polyrhythm.roles.ledger import Attendance, Ledger, ServerLosses
from polyrhythm.roles.member import Member
from polyrhythm.roles.replica import FlatReplica
from polyrhythm.roles.result import bytes_per_step, defence_figures, staleness_figures
from polyrhythm.roles.step_metrics import Tally
from polyrhythm.roles.trainer import Trainer, TrainingRun
from polyrhythm.roles.world import World
from polyrhythm.strategies.strategy import Remarks
from polyrhythm.strategies.worker_part import Step, WorkerCalls, WorkerSetting

_NO_LOSS = float("nan")


@dataclass(slots=True)
class DryBatch:
    """A batch that is only counted; see `Batch`."""

    size: int


class DryWorkload:
    """A model that weighs nothing; see `ComputedWorkload`.

    Args:
        dry_run: what is run dry.
        world: where this rank is; its pace must be a drawn one, since nothing is computed.

    Attributes:
        replica: a few numbers that stand for the model.
        batch_size: images of a full batch.
        rate_ratio: 1.
        report_steps: after how many steps a report is due.
        calendar: which step belongs to which epoch.
        sizes: relative parts of a global batch, of the workers that are there; empty: all alike.
        limit: 0: memory holds everything.
        hand: the batches that this worker draws; None where it has a fixed share.
    """

    __slots__ = (
        "_announce",
        "_computed",
        "_computes_together",
        "_dry_run",
        "_gradient",
        "_pace",
        "_place",
        "_shares",
        "_timer",
        "_use",
        "_worker",
        "batch_size",
        "calendar",
        "hand",
        "limit",
        "rate_ratio",
        "replica",
        "report_steps",
        "sizes",
    )

    def __init__(self, dry_run: DryRun, world: World) -> None:
        assert world.pace is not None, (
            "nothing is computed here, so the pace must draw the time that it takes"
        )
        flat = dry_run.stand_in.flat(still=dry_run.still)
        setting = WorkerSetting(
            world.network,
            world.workers(),
            world.roles,
            flat,
            dry_run.plan(flat),
            None if dry_run.draws else dry_run.steps,
            world.rejoins,
            world.generation,
            world.leader_returns,
        )
        self.replica = FlatReplica(dry_run.strategy, world, setting, announce=True)
        self._computes_together = dry_run.traits.cuts_network and not dry_run.traits.pipelines
        if self._computes_together:
            self.replica.part.divide(dry_division(flat, dry_run.sizes, len(world.roles.workers)))
        self.batch_size, self.rate_ratio = dry_run.batch_size, 1.0
        self.report_steps = dry_run.steps_per_report
        self.sizes: tuple[float, ...] = ()
        self.limit = 0
        self.hand: Hand | None = None
        self.calendar = DryCalendar(dry_run)
        self._worker = self._place = self.replica.workers.rank
        self._dry_run = dry_run
        # Asked for at every step of thousands of workers.
        self._pace, self._timer = world.pace, world.timer
        self._gradient = None if dry_run.still else dry_run.gradient
        self._shares = self.replica.pass_shares(dry_run.sizes.shares)
        self._use, self._announce = self.replica.use, self.replica.announce
        self._computed = _NO_LOSS, dry_run.learning_rate, True

    def share_out(self, place: int, present: int) -> None:
        """Continue with the same batches: the loss of a worker does not make the others' steps longer.

        Where parts differ, those who are left share them out.
        """
        self._place = place

    def share_out_apart(self, absent: tuple[int, ...], place: int, present: int) -> None:
        """Continue with the same batches."""

    def global_batch(self, epoch: int) -> int:
        """Return the images of the largest step of all workers in an epoch; of this worker's group, where it draws."""
        if self.hand is not None:
            return self._dry_run.largest_drawn(epoch, len(self.unit))
        return self._dry_run.images_together(self.calendar.start(epoch + 1) - 1)

    @property
    def unit(self) -> tuple[int, ...]:
        """Indices of the workers that draw batches together with this one."""
        return next(unit for unit in self._dry_run.units if self._worker in unit)

    def batches(self, epoch: int, start: int) -> Iterator[DryBatch]:
        """Return this worker's batches of an epoch, from a step on; see `ComputedWorkload`."""
        dry_run = self._dry_run
        if self.hand is not None:
            unit = self.unit
            place, drawn, sizes = unit.index(self._worker), self.hand.batches(epoch, start), self.sizes
            if not dry_run.epoch_images:
                full = len(unit) * dry_run.batch_size
                same = DryBatch(split(full, sizes)[place] if sizes else dry_run.batch_size)
                return (same for _ in drawn)
            parts = sizes or (1.0,) * len(unit)
            return (DryBatch(split(batch.stop - batch.start, parts)[place]) for batch in drawn)
        if self.sizes:
            return (DryBatch(self._part(dry_run.images_together(step))) for step in count(start))
        if not dry_run.epoch_images:
            return repeat(DryBatch(dry_run.batch_size))
        return (DryBatch(dry_run.images(self._worker, step)) for step in count(start))

    def _part(self, images: int) -> int:
        return split(images, self.sizes)[self._place]

    def compute(self, step: Step, batch: DryBatch) -> tuple[float, float, bool]:
        """Let the time of a step pass; its gradients are those of the dry run, mostly zeros."""
        if batch.size:
            work = batch.size / self.batch_size if self.sizes else 1.0
            shares, gradient, pace = self._shares, self._gradient, self._pace
            if gradient is None and not shares:
                pace.whole(work)
            else:
                step.learning_rate = self._computed[1]
                pace.forward(shares, self._use, work)
                if gradient is not None:
                    gradient(self._worker, step.number, self.replica.flat.gradients)
                pace.backward(shares, self._announce)
            if self._timer is not None:
                self._timer.lap("backward")
        if self._computes_together:
            self.replica.part.compute(step, torch.empty(batch.size, 0), _without_loss)
        return self._computed

    def part_of_test(self, place: int, parts: Sequence[int], workers: Communicator | None) -> None:
        """Nothing is tested."""

    def record(self, account: Account) -> WorkerState:
        """Return the account: there is no model, and nothing is learned."""
        return WorkerState(replace(account, epoch_images=0, epoch_loss=0.0), {}, {}, {})

    def cache_use(self) -> None:
        """There are no images."""

    def gradient_noise(self) -> None:
        """There are no gradients."""


def _without_loss(logits: Tensor, place: slice) -> Tensor:
    """Return no loss: nobody looks at numbers that are not there."""
    return logits


def _without_timer(part: str, what: str) -> None:
    """Note nothing: nobody asked for timings."""


class DryPipelineWorkload(DryWorkload):
    """As `DryWorkload`, where workers compute a batch together and let the time pass between their messages."""

    __slots__ = ()

    def __init__(self, dry_run: DryRun, world: World) -> None:
        super().__init__(dry_run, world)
        self.replica.part.take_sizes(dry_run.sizes.pieces)

    def compute(self, step: Step, batch: DryBatch) -> tuple[float, float, bool]:
        """Let the workers of a pipeline take their step together."""
        dry_run, pipelines = self._dry_run, self._dry_run.traits.pipelines
        images = dry_run.images_of_pipeline(step.number, self._worker % pipelines, pipelines)
        full = dry_run.workers * self.batch_size // pipelines
        self._pace.forward((), self._use)
        lap = _without_timer if self._timer is None else self._timer.lap
        self.replica.part.compute_dry(step, images, full, self._pace.part, lap)
        if self._gradient is not None:
            self._gradient(self._worker, step.number, self.replica.flat.gradients)
        if self._timer is not None:
            self._timer.lap("backward")
        return self._computed


class DryCalendar:
    """The epochs of a dry run, the last one perhaps not whole; see `Calendar`.

    Args:
        dry_run: what is run dry.

    Attributes:
        epochs: of the run.
        total_steps: that every worker takes.
    """

    def __init__(self, dry_run: DryRun) -> None:
        self.epochs = dry_run.epochs
        self.total_steps = dry_run.steps
        self._length = dry_run.steps_per_epoch

    def start(self, epoch: int) -> int:
        """Return the steps before an epoch; before the one after the last, all."""
        return min(epoch * self._length, self.total_steps)

    def epoch_of(self, step: int) -> int:
        """Return the epoch that a step belongs to; how many epochs there are, if it is beyond the end."""
        return self.epochs if step >= self.total_steps else step // self._length


def work_dry(dry_run: DryRun, world: World) -> None:
    """Take all steps of one worker of a dry run, or fewer if a rank is asked to stop.

    Args:
        dry_run: what is run dry.
        world: where this rank is; its pace must be a drawn one, since nothing is computed. The leader emits the events
            and figures of the run.
    """
    if dry_run.timings:
        world = world.timed()
    blocked = None
    traits = dry_run.traits
    if traits.waits_inside and (len(dry_run.sizes.buckets) > 1 or not traits.overlaps_passes):
        world, blocked = world.watched()
    workload = (DryPipelineWorkload if dry_run.traits.pipelines else DryWorkload)(dry_run, world)
    drawing = deal_communicator(world) if dry_run.draws else None
    control: ControlPlane = (
        dry_leader(dry_run, world, workload.replica.part)
        if world.leads
        else Member(world, dry_run.strategy, dry=True)
    )
    if drawing is not None:
        workload.hand = Hand(drawing, control.await_leader, world.clock.now, world.generation)
    trainer = Trainer(world, dry_run.strategy, workload, control)
    control.enter()
    start = trainer.open(0)
    # All ranks of a dry run that may have successors share one clock, which began with the run.
    elapsed_s = world.clock.now() if world.rejoins else 0.0
    if start:  # a successor says at once that it is there
        hand, rate = workload.hand, dry_run.learning_rate
        epoch = workload.calendar.epoch_of(start - 1) if hand is None else hand.come_to(start)
        control.begin(epoch)
        first = Tally(trainer.worker, world.clock).say(epoch, start, rate)
        control.report(replace(first, time_s=elapsed_s))
    in_step = dry_run.traits.lockstep
    batch = workload.global_batch(0)
    clock = world.clock
    balancer = balancer_for(
        dry_run.balance,
        dry_run.strategy,
        world,
        workload.replica.workers,
        batch,
        drawn=dry_run.draws,
        compute_time=None if blocked is None else lambda: clock.now() - blocked.seconds,
    )
    run = TrainingRun(
        trainer,
        workload,
        control,
        world,
        in_step=in_step,
        balancer=balancer,
        blocked=blocked,
        staged=dry_run.traits.pipelines > 0,
    )
    run.run(start, elapsed_s)


class DryDuties(Duties):
    """The leader's duties in a dry run: accounts and figures only.

    Args:
        dry_run: what is run.
        world: where this rank is.
        part: worker 0's, which lets the servers go.
        ledger: of the run so far.
    """

    dry = True

    def __init__(self, dry_run: DryRun, world: World, part: WorkerCalls, ledger: Ledger) -> None:
        self._dry_run = dry_run
        self._world = world
        self._part = part
        self._ledger = ledger
        self._emitter = EventEmitter(world, ledger)
        if dry_run.draws:
            dealer = dry_run.dealer()
            for unit, *grant in ledger.drawn:
                dealer.note(unit, Grant(*grant))
            # Nobody else reads of draws, of which thousands of workers make many.
            say = self._emitter.say if world.leader_returns else None
            self.deal = Deal(dealer, dry_run.units, deal_communicator(world), world.clock.now, say)

    def say(self, event: Event) -> None:
        """Emit a loss or a successor."""
        self._emitter.say(event)

    def take_up(self) -> None:
        """Go on with the time of the run."""
        assert self._ledger.began_at_s is not None, "a leader has a successor when training has started"
        self._emitter.take_up(self._ledger.began_at_s)

    def begin(self, epoch: int) -> None:
        """Say that the run has started, unless that has been said."""
        if self._ledger.began:
            return
        dry_run, world = self._dry_run, self._world
        self._emitter.begin()
        world.emit(
            RunStarted(
                time_s=0,
                strategy=str(dry_run.strategy),
                data=dry_run.data,
                model=dry_run.model,
                workers=len(world.roles.workers),
                servers=len(world.roles.servers),
                epochs=dry_run.epochs,
                steps_per_epoch=dry_run.steps_per_epoch,
                parameters=dry_run.sizes.parameters,
                free_running=not dry_run.traits.waits_for_slower,
                images=dry_run.images_drawn,
            )
        )
        strategy = dry_run.strategy
        if isinstance(strategy, Remarks) and (remark := strategy.remark(dry_run.workers)):
            world.emit(Notice(time_s=0, text=remark))
        if dry_run.traits.sends_by_value and dry_run.computes_nothing:
            text = (
                f"what {strategy} sends depends on the gradients' values, of which a dry run has none: what only large "
                "ones cause is not sent here; simulate with real gradients to see it"
            )
            world.emit(Notice(time_s=0, text=text))

    def end(self) -> None:
        """Let the servers and then the workers go, and say what the run has come to."""
        leader = self.leader
        self._part.let_go()
        leader.servers.wait()
        leader.let_leave()
        seconds = self._emitter.elapsed_s
        accounts = [state.account for state in leader.workers.in_order]
        reports = [leader.servers.reports[rank] for rank in sorted(leader.servers.reports)]
        losses = leader.servers.attendance.losses
        outcome = "interrupted" if any(entry.stopped for entry in accounts) else "done"
        figures = dry_figures(self._dry_run, accounts, reports, leader.attendance, losses, seconds)
        self._world.emit(RunEnded(time_s=seconds, outcome=outcome, result=figures))


def dry_figures(
    dry_run: DryRun,
    accounts: list[Account],
    reports: list[dict[str, Any]],
    attendance: Attendance,
    losses: ServerLosses,
    seconds: float,
) -> dict[str, Any]:
    """Return the figures of a dry run, as `train --json` prints them; what only training tells is None.

    Args:
        dry_run: what was run.
        accounts: that the workers have handed in, in the order of their ranks.
        reports: of the servers, likewise.
        attendance: of the workers.
        losses: of servers.
        seconds: that it took.
    """
    steps, length = accounts[0].step, dry_run.steps_per_epoch
    images = sum(account.session_images for account in accounts) + attendance.images_of_lost
    return {
        "run": None,
        "strategy": str(dry_run.strategy),
        "data": dry_run.data,
        "model": dry_run.model,
        "workers": dry_run.workers,
        "servers": dry_run.traits.servers,
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
        "servers_lost": losses.lost,
        "servers_joined": losses.joined,
        "bytes_sent_per_step": bytes_per_step(accounts, reports, attendance.steps_of_lost),
        "staleness": staleness_figures(accounts, reports),
        **defence_figures(reports),
        "parameters_sha256": None,
    }


def dry_leader(dry_run: DryRun, world: World, part: WorkerCalls) -> Leader:
    """Return the control plane of worker 0 in a dry run.

    Args:
        dry_run: what is run.
        world: where this rank is.
        part: worker 0's.
    """
    ledger = world.ledger or Ledger.of(len(world.roles.workers))
    duties = DryDuties(dry_run, world, part, ledger)
    return Leader(world, dry_run.strategy, duties, ledger)

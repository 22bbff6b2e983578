"""What the leader does for a training run: it tests, saves, and makes the run's figures and its recording.

`RunFigures` makes the figures and the recording of a run that is over. `Inheritance` is what the lost leader
has left undone, and how its successor finishes it:

where all hold the same            the parameters of now are tested and saved
where each has a model of its own  what they handed in at the end of an epoch (`Stock`), before regrouping

Batch-norm statistics, accounts and states are handed in again by the workers, the average of the weights is in the
archive, the parameters are on the servers, and the ledger says what has been announced: nothing of it again.

`CheckpointCollector` collects a checkpoint of all ranks, and tests the model. The result of a test goes with the
checkpoint that is saved after it, by which the best one is known. The model as it is tested and saved is not
always the model as it is trained: `Presentation` puts averaged weights and the mean batch-norm statistics of all
workers in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyrhythm.claim import UNCLAIMED, Unclaimed
from polyrhythm.communication.arrivals import Arrivals
from polyrhythm.data.cached_split import left_out_of
from polyrhythm.data.dealer import Grant
from polyrhythm.data.dealing import Begun
from polyrhythm.data.seeding import sample_keys
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.evaluate import Evaluation, InDtype, PartialEvaluation, disjoint, evaluate
from polyrhythm.evaluation.predictions import (
    PICTURES_FILE,
    PREDICTIONS_FILE,
    pictures_json,
    predictions_csv,
)
from polyrhythm.events import Evaluated, Event, Notice, RunEnded, RunStarted
from polyrhythm.models.weights import save_weights
from polyrhythm.roles import result
from polyrhythm.roles.checkpointing.archive import Archive, Archivist, Snapshot, counted_steps
from polyrhythm.roles.checkpointing.handing_over import handed_over
from polyrhythm.roles.checkpointing.recording import ARRIVALS_FILE, recording_of
from polyrhythm.roles.checkpointing.worker_state import WorkerState, mean_buffers
from polyrhythm.roles.control_plane import Boundary, EvaluatesPart
from polyrhythm.roles.deal import MOST_STEPS, Deal, deal_communicator
from polyrhythm.roles.job import Job, tested_at_once
from polyrhythm.roles.leading.leader import Duties, EventEmitter, Leader
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.strategy import RecutsServers, Remarks
from polyrhythm.strategies.worker_part import WorkerCalls
from polyrhythm.training.checkpoint import restoring
from polyrhythm.training.memory import return_freed
from polyrhythm.training.weight_averaging import WeightAverage


class TrainingDuties(Duties):
    """The leader's duties in training: it tests, saves, and makes the figures of the run.

    Args:
        job: what is learned.
        world: where this rank is.
        replica: this worker's.
        ledger: of the run so far.

    Attributes:
        job: what is learned; once a checkpoint has been read, with what others did of it.
    """

    def __init__(self, job: Job, world: World, replica: Replica, ledger: Ledger) -> None:
        self.job = job
        self._world = world
        self._replica = replica
        self._ledger = ledger
        self._in_step = job.traits.lockstep
        self._emitter = EventEmitter(world, ledger)
        if job.draws and not (job.checkpointing.resume and world.ledger is None):
            self._deal_from(ledger.deal, ledger.drawn)
        self._too_few: int | None = None
        """How many workers were left when there were too few."""
        self._images_before: int | None = None
        """Images that counted as done in the checkpoint that this run goes on from."""
        self._untested: Snapshot | None = None
        """The checkpoint that this run goes on from, where it was written and killed before its model was tested."""

    def attach(self, leader: Leader) -> None:
        super().attach(leader)
        self._figures = RunFigures(self.job, self._world, self._replica, leader)
        self._collector = CheckpointCollector(
            self.job, self._world, self._replica, leader, self._emitter, self._ledger
        )
        if self._world.ledger is not None:
            self._go_on(self._ledger.begun)

    @property
    def begun(self) -> Begun:
        return self.job.begun

    @property
    def elapsed_s(self) -> float:
        return self._emitter.elapsed_s

    @property
    def paused_s(self) -> float:
        return self._emitter.paused_s

    def say(self, event: Event) -> None:
        """Emit a loss or a successor; stop the run where too few workers are left."""
        self._emitter.say(event)
        attendance, losses = self.leader.attendance, self.job.fault_tolerance
        left = len(attendance.present)
        if left < losses.min_workers and attendance.lost > losses.restarts:
            self._too_few = left if self._too_few is None else min(left, self._too_few)
            self._world.stop.request()

    def restore(self) -> WorkerState | None:
        if not self.job.checkpointing.resume:
            return None
        with restoring("the checkpoint"):
            return self._restored()

    def _restored(self) -> WorkerState:
        snapshot = self._collector.load()
        same = snapshot.was is None
        if not same:
            snapshot, remark = handed_over(snapshot, self.job, self._replica.plan)
            self._collector.remarks.append(remark)
        self._go_on(snapshot.begun)
        if same and self._lacks_test(snapshot):
            self._untested = snapshot
        if self.job.draws:
            self._deal_from(snapshot.deal)
        own_size, size = self._replica.flat.size, snapshot.parameters.numel()
        if own_size != size:
            raise RequestError(
                f"the checkpoint has {size:,} parameters, and the network {own_size:,}: resume with the classes and "
                "the model that the run was begun with, or start a new run"
            )
        self._replica.flat.vector.copy_(snapshot.parameters)
        replicated = self._replica.part.replicated
        behind = snapshot.behind(self.job.workers)
        others = {
            worker: replace(snapshot.worker(worker, replicated), behind=worker in behind)
            for worker in range(1, self.job.workers)
        }
        own = snapshot.worker(0, replicated)
        self._images_before = self._images_done(snapshot)
        servers, strategy = snapshot.servers, self.job.strategy
        if isinstance(strategy, RecutsServers):
            servers = strategy.recut(servers, self._replica.plan)
        self.leader.hand_out(others, servers, behind)
        self._emitter.earlier_s = snapshot.seconds
        return own

    def _images_done(self, snapshot: Snapshot) -> int | None:
        """Return the images of the run that count as done in a checkpoint; None where nobody knows."""
        workers = self.job.workers
        try:
            rule = self.job.strategy.resharding(workers, workers)
        except RequestError:
            return None
        _, steps = counted_steps(snapshot, self.job, rule)
        if self.deal is None:
            calendar = self.job.calendar
            return sum(calendar.dealt) - calendar.images_after(steps)
        dealt = sum(self.deal.images_from(worker, step) for worker, step in enumerate(steps))
        return self.job.deck.all_images - self.deal.undealt - dealt

    def take_up(self) -> None:
        assert self._ledger.began_at_s is not None, "a leader has a successor when training has started"
        self._emitter.take_up(self._ledger.began_at_s)

    def inherit(self) -> None:
        """Test and save what others handed in at the end of an epoch, before they go on."""
        self._inheritance.take_up()

    def begin(self, epoch: int) -> None:
        """Say that training starts, unless that has been said."""
        if self._ledger.began:
            return
        folder = self.job.checkpointing.folder
        if folder is not None:  # of what this run goes on from
            self.job.checkpointing.claim.remove(folder / ARRIVALS_FILE)
        self._emitter.begin()
        opening = self._figures.opening(epoch, self._emitter.earlier_s)
        opening = replace(opening, images_before=self._images_before)
        self._emitter.say(opening if self.deal is None else replace(opening, deal=self.deal.opening))
        strategy, of_data = self.job.strategy, self.job.dataset.remark
        of_strategy = strategy.remark(self.job.workers) if isinstance(strategy, Remarks) else ""
        outlook = self._replica.part.outlook
        of_stages = "" if outlook is None else outlook.text
        for remark in (of_strategy, of_stages, of_data, *self._collector.remarks):
            if remark:
                self._emitter.say(Notice(time_s=0, text=remark))
        if (untested := self._untested) is not None:
            self._untested = None
            states = [state for _, state in sorted(untested.workers.items())]
            self._collector.evaluate(untested.epoch, untested.presented, states=states)
            self._stop_where_reached(untested.epoch)

    def _lacks_test(self, snapshot: Snapshot) -> bool:
        """Return whether a checkpoint is of the end of an epoch whose test was lost with the run that wrote it."""
        epoch, tested = snapshot.epoch, self.job.checkpointing.tested
        if self.job.draws or tested is None or not tested < epoch < self.job.learning.epochs:
            return False
        return snapshot.step == self.job.calendar.start(epoch)

    def _stop_where_reached(self, epochs: int) -> None:
        if self._reached:
            text = f"the test after epoch {epochs} has reached {self.job.until}: training ends"
            self._emitter.say(Notice(time_s=0, text=text))
            self._world.stop.request()

    def after_step(self) -> None:
        self._collector.step_done()

    def boundary(
        self,
        why: Boundary,
        record: WorkerState,
        epochs: int,
        presented: Tensor | None,
        test: EvaluatesPart | None = None,
    ) -> None:
        """Test and save where an epoch or this session is over, or the lost leader did not come to it."""
        step = record.account.step
        if why is Boundary.EPOCH:
            self._end_epoch(epochs, step, presented, test)
        elif why is Boundary.STOP:
            self._end_early(step)
        elif self._world.rejoins:
            self._inheritance.finish(step)

    def end(self) -> None:
        """Let the servers go, test and save the final model, let the workers go, and say that the run is over."""
        self._replica.part.let_go()
        self.leader.servers.wait()
        trained_s = self._emitter.trained_s
        reached = self._reached
        stopped = self._figures.stopped and not reached
        if not stopped:
            self._collector.finish(self._collector.tested_epochs if reached else self.job.learning.epochs)
        self._collector.wait()
        if stopped and self._too_few is not None:
            raise self.job.too_few(self._too_few)
        outcome = "interrupted" if stopped else "done"
        self._figures.keep_arrivals(outcome)
        self.leader.let_leave()
        if not stopped:
            self._collector.keep_predictions()
        spent = Spent(self._emitter.total_s, trained_s)
        figures = self._figures.result(spent, self._collector.found)
        if self.job.until is not None:
            figures["reached"] = reached or self._reached
        self._emitter.say(RunEnded(time_s=0, outcome=outcome, result=figures))

    @property
    def _reached(self) -> bool:
        """Whether the newest test has reached what was to be reached."""
        until, found = self.job.until, self._collector.found
        return (
            until is not None
            and found is not None
            and until.reached(loss=found.loss, top1=found.top1, top5=found.top5)
        )

    def _end_epoch(
        self, epochs: int, step: int, presented: Tensor | None, test: EvaluatesPart | None
    ) -> None:
        """Evaluate and save, with the other workers' states: all where they go in lockstep, else the latest.

        What the lost leader did is not done again, though its successor may have had to take steps again before it.
        """
        leader = self.leader
        last = epochs == self.job.learning.epochs
        leader.read()
        if last and self.deal is not None:
            leader.wait_for_work_done()
        elif last:  # hears the slower ones while they train, and not only once the servers let go
            leader.wait_for_step(step)
        paused_at = self._world.clock.now()
        tests = (
            not last and epochs > self._ledger.tested_epochs
        )  # the final model is tested when all have left
        own = self._collector.test(test) if tests and test is not None else None
        if self._in_step:
            leader.wait_for_step(step)
        if tests:
            self._collector.evaluate(epochs, presented, [] if own is None else [own, *self._tested(step)])
            self._stop_where_reached(epochs)
        if epochs > self._ledger.saved_epochs:
            self._collector.save(self._collector.snapshot(epochs, step, presented), tested=not last)
        self._emitter.paused_s += self._world.clock.now() - paused_at

    def _tested(self, step: int) -> list[PartialEvaluation]:
        """Return what others have found who hold the same model, after so many steps."""
        others = [state for state in self._figures.states if state.account.worker != LEADER]
        return [
            PartialEvaluation.from_tensors(state.tested)
            for state in others
            if state.tested and state.account.step == step
        ]

    def _end_early(self, step: int) -> None:
        """Save, once every worker has stopped where it will stop."""
        calendar = self.job.calendar
        if self._in_step:
            self.leader.wait_for_step(step)
        elif self.deal is not None:
            self.leader.wait_for_work_done()
        else:
            self.leader.wait_for_stop(calendar.total_steps)
        epoch = calendar.epoch_of(step) if self.deal is None else self.deal.epoch_of(LEADER, step)
        self._collector.save(self._collector.snapshot(epoch, step))
        self._collector.wait()

    @property
    def _inheritance(self) -> Inheritance:
        return Inheritance(self.job, self._replica, self.leader, self._collector, self._emitter, self._ledger)

    def _deal_from(self, told: dict[str, Any], drawn: Sequence[tuple[int, ...]] = ()) -> None:
        """Make the deal, where a run goes on as it was written, with what was drawn since."""
        dealer = self.job.dealer(told)
        for unit, *grant in drawn:
            dealer.note(unit, Grant(*grant))
        self.deal = Deal(
            dealer, self.job.units, deal_communicator(self._world), self._world.clock.now, self._emitter.say
        )

    def _go_on(self, begun: Begun) -> None:
        """Take up what others did of epochs that are not over."""
        self.job = self._figures.job = self._collector.job = self.job.going_on(begun)


def training_leader(job: Job, world: World, replica: Replica) -> Leader:
    """Return the control plane of worker 0 in training.

    Args:
        job: what is learned.
        world: where this rank is.
        replica: this worker's.
    """
    ledger = world.ledger or Ledger.of(job.workers)
    return Leader(world, job.strategy, TrainingDuties(job, world, replica, ledger), ledger, replica)


@dataclass(frozen=True)
class Unfinished:
    """What the lost leader owed to the last epoch that it had come through.

    Attributes:
        epochs: that are over.
        test: whether the model has not been tested.
        save: whether no checkpoint has been written.
        is_last: whether no epoch comes after.
        at_its_end: whether no step has been done since.
    """

    epochs: int
    test: bool
    save: bool
    is_last: bool
    at_its_end: bool


@dataclass(frozen=True)
class Stock:
    """What the others held at the end of an epoch, as they handed it in to the lost leader, and again to its successor.

    Attributes:
        states: theirs, and that of one of them in place of worker 0's.
        first: `(size,)`, the model of the first of them.
        mean: `(size,)`, of all their models.
    """

    states: dict[int, WorkerState]
    first: Tensor
    mean: Tensor


class Inheritance:
    """A new leader's.

    Args:
        job: what is learned, with what others did of it.
        replica: the leader's.
        leader: hears the others.
        collector: tests and saves.
        emitter: says what is not as it would have been.
        ledger: of the run so far.
    """

    def __init__(
        self,
        job: Job,
        replica: Replica,
        leader: Leader,
        collector: CheckpointCollector,
        emitter: EventEmitter,
        ledger: Ledger,
    ) -> None:
        self._job = job
        self._replica = replica
        self._leader = leader
        self._collector = collector
        self._emitter = emitter
        self._ledger = ledger
        self._agree = job.traits.identical
        self._regroups = job.faults.regroups

    def take_up(self) -> None:
        """Test and save what the others held when an epoch was over, where each has a model of its own."""
        if self._has_stock:
            self._leader.await_introductions()
            self._finish_with_stock()

    def finish(self, step: int) -> None:
        """Test and save what the lost leader did not come to, with the parameters of now.

        Args:
            step: steps that the leader has done, as far as they count.
        """
        self._collector.inherit()
        if self._has_stock:
            self._finish_with_stock()
        missing = self._missing(step)
        if not (missing.test or missing.save):
            return
        presented = None if self._regroups else self._replica.part.present()
        if missing.is_last or (self._regroups and missing.at_its_end):
            self._leader.wait_for_step(step)
        if missing.test:
            if not (missing.at_its_end and self._agree):
                text = (
                    f"worker 0 was lost before the model was tested after epoch {missing.epochs}: its successor tests "
                    "the parameters as they are now"
                )
                self._emitter.say(Notice(time_s=0, text=text))
            self._collector.evaluate(missing.epochs, presented)
        if missing.save and (missing.at_its_end or not self._regroups):
            # Otherwise they have states of several steps.
            self._collector.save(
                self._collector.snapshot(missing.epochs, step, presented), tested=missing.test
            )
        if not self._regroups:  # who go in step wait meanwhile
            self._replica.part.catch_up()

    @property
    def _has_stock(self) -> bool:
        """Whether the others have handed in models of their own."""
        return self._regroups and not self._agree and not self._collector.averages

    def _finish_with_stock(self) -> None:
        """Test and save what the others held when an epoch was over, if that is left undone: they have gone on."""
        reached = [
            state.account.step for worker, state in self._leader.workers.states.items() if worker != LEADER
        ]
        step = max(reached, default=0)
        missing = self._missing(step)
        stock = stock_of(self._leader.workers.states, self._replica.part, step)
        if stock is None or missing.is_last or not missing.at_its_end:
            return
        mean = stock.mean.to(self._replica.flat.vector.device)
        if missing.test:
            self._collector.evaluate(missing.epochs, mean)
            self._ledger.tested_epochs = missing.epochs
        if missing.save and (snapshot := self._collector.snapshot(missing.epochs, step, mean)) is not None:
            kept = replace(snapshot, parameters=stock.first, workers=stock.states)
            self._collector.save(kept, tested=missing.test)
            self._ledger.saved_epochs = missing.epochs

    def _missing(self, step: int) -> Unfinished:
        epochs = None if (deal := self._leader.deal) is None else deal.epoch_of(LEADER, step)
        return unfinished(self._ledger, self._job, step, epochs, saves=self._collector.saves)


def stock_of(states: dict[int, WorkerState], part: WorkerCalls, step: int) -> Stock | None:
    """Return what is known of a step; None where nobody has handed in a model of its own after it.

    Args:
        states: the workers'.
        part: of the leader, which knows what is in them.
        step: at the end of an epoch.
    """
    found = {
        worker: state for worker, state in sorted(states.items()) if worker and state.account.step == step
    }
    models = [part.model_in((state.part, state.part_facts)) for state in found.values() if state.part]
    held = [model for model in models if model is not None]
    if not held:
        return None
    first = next(iter(found.values()))
    return Stock(
        {LEADER: replace(first, account=replace(first.account, worker=LEADER))} | found,
        held[0],
        torch.stack(held).mean(0),
    )


def unfinished(
    ledger: Ledger, job: Job, step: int, drawn_epochs: int | None = None, *, saves: bool
) -> Unfinished:
    """Return what is left to be done of the epochs before.

    Args:
        ledger: of the run so far.
        job: what is learned.
        step: steps that the leader has done, as far as they count.
        drawn_epochs: epochs before that of the leader's next batch, where batches are drawn.
        saves: whether the run writes checkpoints.
    """
    epochs = job.calendar.epoch_of(step) if drawn_epochs is None else drawn_epochs
    last = epochs == job.learning.epochs  # the final model is tested when all have left
    return Unfinished(
        epochs,
        test=epochs > ledger.tested_epochs and not last,
        save=saves and epochs > ledger.saved_epochs,
        is_last=last,
        at_its_end=drawn_epochs is None and step == job.calendar.start(epochs),
    )


def tested_before(ledger: Ledger) -> Evaluation | None:
    """Return what the newest test came to, but for its classes, of which nobody was told."""
    found = ledger.tested
    if found is None:
        return None
    return Evaluation(
        loss=found.test_loss,
        top1=found.test_top1,
        top5=found.test_top5,
        images=0,
        per_class=(),
        confusion=torch.empty(0, 0),
    )


def inherit_average(average: WeightAverage, archive: Archive | None, replica: Replica) -> None:
    """Go on with the average of the newest checkpoint, or begin one at the present parameters."""
    average.value.copy_(replica.flat.vector)
    if archive is None:
        return
    try:
        saved = archive.load().average
    except RequestError:  # nothing was saved yet
        return
    if saved:
        average.load_state_dict(saved)


@dataclass(frozen=True)
class Spent:
    """The time of a run.

    Attributes:
        seconds: in all, with those of the runs that it resumes.
        trained_s: in this session, without what the leader was away to test.
    """

    seconds: float
    trained_s: float


class RunFigures:
    """What the leader knows of a run.

    Args:
        job: what is learned.
        world: where the leader is.
        replica: the leader's.
        leader: what it has been told.

    Attributes:
        job: what is learned, with what others did of it.
    """

    def __init__(self, job: Job, world: World, replica: Replica, leader: Leader) -> None:
        self.job = job
        self._world = world
        self._replica = replica
        self._leader = leader

    @property
    def states(self) -> list[WorkerState]:
        """The latest of every worker that is there, in the workers' order."""
        return self._leader.workers.in_order

    @property
    def stopped(self) -> bool:
        """Whether a worker was stopped early."""
        return any(state.account.stopped for state in self.states)

    def opening(self, epoch: int, earlier_s: float) -> RunStarted:
        """Return what is said of a run when its training starts.

        Args:
            epoch: that it starts in.
            earlier_s: seconds of training before this session.
        """
        job, roles = self.job, self._world.roles
        return RunStarted(
            time_s=0,
            strategy=str(job.strategy),
            data=job.dataset.name,
            model=job.model_name,
            workers=len(roles.workers),
            servers=len(roles.servers),
            epochs=job.learning.planned_epochs,
            steps_per_epoch=job.steps_per_epoch,
            steps=job.planned.calendar.total_steps,
            start_step=job.calendar.start(epoch),
            start_epoch=epoch,
            earlier_s=earlier_s,
            parameters=self._replica.flat.size,
            free_running=not job.traits.waits_for_slower,
            begun=job.begun.to_json(),
            images=job.planned.deck.all_images if job.draws else 0,
        )

    def keep_arrivals(self, outcome: str) -> None:
        """Write down whom every rank has heard, so that the run can be replayed."""
        folder = self.job.checkpointing.folder
        if folder is None or self._world.arrivals is None:
            return
        roles = self._world.roles
        told = {roles.workers[state.account.worker]: state.account.arrivals for state in self.states}
        told |= {rank: report["arrivals"] for rank, report in self._leader.servers.reports.items()}
        # With what this one heard while others left.
        told[self._world.network.rank] = self._world.arrivals.to_json()
        ranks = {rank: Arrivals.from_json(entry) for rank, entry in told.items() if entry}
        digest = result.digest(self._replica.flat.vector)
        lost = self._leader.attendance.lost
        deal = None if self._leader.deal is None else self._leader.deal.grants
        recording_of(
            self.job, roles, ranks, outcome=outcome, parameters_sha256=digest, workers_lost=lost, deal=deal
        ).write(folder, self.job.checkpointing.claim)

    def result(self, spent: Spent, found: Evaluation | None) -> dict[str, Any]:
        """Return the figures, as `train --json` prints them.

        Args:
            spent: the time of the run.
            found: by the last test, if there was one.
        """
        job = self.job
        accounts = [state.account for state in self.states]
        reports = list(self._leader.servers.reports.values())
        attendance = self._leader.attendance
        images = sum(account.session_images for account in accounts) + attendance.images_of_lost
        return {
            "run": str(job.checkpointing.folder) if job.checkpointing.folder is not None else None,
            "strategy": str(job.strategy),
            "data": job.dataset.name,
            "model": job.model_name,
            "workers": job.workers,
            "servers": len(self._world.roles.servers),
            "steps": accounts[0].step,
            "epochs": self._epochs_done(accounts[0].step),
            "seconds": spent.seconds,
            "images_per_s": images / spent.trained_s if spent.trained_s > 0 else 0.0,
            "train_loss": result.train_loss(accounts),
            **(result.test_figures(found) if found is not None else {}),
            "workers_lost": attendance.lost,
            "workers_joined": attendance.joined,
            "servers_lost": self._leader.servers.attendance.losses.lost,
            "servers_joined": self._leader.servers.attendance.losses.joined,
            "images_not_seen": 0 if self.stopped else job.begun.left_out + self._images_not_seen(),
            "bytes_sent_per_step": result.bytes_per_step(accounts, reports, attendance.steps_of_lost),
            "staleness": result.staleness_figures(accounts, reports),
            **result.defence_figures(reports),
            "parameters_sha256": result.digest(self._replica.flat.vector),
            **self._of_stages(),
        }

    def _of_stages(self) -> dict[str, Any]:
        """Return what was said of the stages of a pipeline, and what memory each took."""
        outlook = self._replica.part.outlook
        if outlook is None:
            return {}
        taken = {state.account.worker: state.account.peak_bytes for state in self.states}
        if self._replica.peak is not None:  # which has written the network since
            taken[LEADER] = self._replica.peak()
        return {
            "pipeline": outlook.to_json() | {"measured_bytes": [taken[worker] for worker in sorted(taken)]}
        }

    def _epochs_done(self, step: int) -> float:
        """Return the epochs that the run has come to."""
        deal, job = self._leader.deal, self.job
        if deal is None:
            return job.calendar.epochs_done(step)
        *whole, last = job.deck.images
        an_epoch = whole[0] if whole else last if job.learning.updates is None else len(job.dataset.train)
        left = 0
        if self.stopped:  # else what lost workers have left is told apart
            left = deal.undealt + sum(
                deal.images_from(worker, done) for worker, done in self._steps_done().items()
            )
        epochs = len(whole) + (last - left) / an_epoch
        return int(epochs) if epochs == int(epochs) else round(epochs, 3)

    def _images_not_seen(self) -> int:
        if self.job.faults.regroups:
            part, view = self._replica.part, self._leader.views.pending.view
            lost = 0
            if not part.replicated:
                # Workers that hold the same take a step that broke again, with all its images.
                if part.logged is not None:
                    lost = result.images_of_lost(self.job, view.missed, view.since)
                else:
                    lost = result.images_of_broken_rounds(self.job, view.missed, part.exchanges)
            return lost + result.images_left_out(self.job, view.absences)
        reports, deal = list(self._leader.servers.reports.values()), self._leader.deal
        calendar = self.job.calendar
        images, steps = (calendar.images, calendar.total_steps) if deal is None else (deal.images, MOST_STEPS)
        not_applied = result.images_not_applied(self.job, self._world.roles, reports, images, steps)
        not_there = result.images_of_absent(self.job, self._world.roles, reports, images, steps)
        not_there += result.images_missed(self.job, self._world.roles, reports, images, steps)
        if deal is None:
            not_seen = result.images_not_seen(self.job, self._steps_done())
        else:
            done = self._steps_done().items()
            not_seen = deal.undealt + sum(deal.images_from(worker, step) for worker, step in done)
        return not_seen + not_applied + not_there

    def _steps_done(self) -> dict[int, int]:
        """Return the steps that count of every worker: as it says itself, or as the servers know of a lost one."""
        done = {state.account.worker: state.account.step for state in self.states}
        for worker, rank in enumerate(self._world.roles.workers):
            told = [report["steps"] for report in self._leader.servers.reports.values()]
            held = [steps[str(rank)] for steps in told if str(rank) in steps]  # a site knows of its own only
            done.setdefault(worker, min(held, default=self._leader.attendance.last_step(worker)))
        return done


class CheckpointCollector:
    """Tests and saves on behalf of the leader.

    Args:
        job: what is learned.
        world: where the leader is.
        replica: the leader's.
        leader: has the workers' states, and asks servers for theirs.
        emitter: emits what was tested and saved.
        ledger: of the run so far.

    Attributes:
        job: what is learned, with what others did of it.
        found: by the newest test, if there was one.
        tested_epochs: that were over at that test.
    """

    def __init__(
        self,
        job: Job,
        world: World,
        replica: Replica,
        leader: Leader,
        emitter: EventEmitter,
        ledger: Ledger,
    ) -> None:
        self.job = job
        self._world = world
        self._replica = replica
        self._leader = leader
        self._emitter = emitter
        self._presentation = Presentation(job, replica)
        self._archive = Archive(job) if job.checkpointing.folder is not None else None
        self._archivist = self._employed()
        self.found = tested_before(ledger)
        self.tested_epochs = ledger.tested_epochs
        self._told_of_guessing = False

    @property
    def saves(self) -> bool:
        """Whether the run writes checkpoints."""
        return self._archivist is not None

    @property
    def averages(self) -> bool:
        """Whether the moving average of the weights is what is tested."""
        return self._presentation.average is not None

    @property
    def remarks(self) -> list[str]:
        """What is to be said of the checkpoint that was loaded."""
        return [] if self._archive is None else self._archive.remarks

    def load(self) -> Snapshot:
        """Read the newest checkpoint, and go on with its average."""
        assert self._archive is not None, "a resumed run has a folder"
        snapshot = self._archive.load()
        if self._presentation.average is not None and snapshot.average:
            self._presentation.average.load_state_dict(snapshot.average)
        return snapshot

    def inherit(self) -> None:
        """Go on with the lost leader's average of the weights, as far as it is known."""
        if self._presentation.average is not None:
            inherit_average(self._presentation.average, self._archive, self._replica)

    def step_done(self) -> None:
        """Keep the weight average, for which the step must be over."""
        if self._archivist is not None:
            self._archivist.look()
        if self._presentation.average is not None:
            self._replica.settle()
            self._presentation.average.update(self._replica.flat.vector)

    def test(self, part: EvaluatesPart) -> PartialEvaluation:
        """Return what this worker's part of a test comes to."""
        with self._world.activity.doing("testing the model", takes_long=True):
            return part()

    def evaluate(
        self,
        epoch: int,
        presented: Tensor | None = None,
        tested: Sequence[PartialEvaluation] = (),
        states: list[WorkerState] | None = None,
    ) -> None:
        """Test the model.

        Args:
            epoch: epochs that are over.
            presented: `(size,)`, the parameters to test, where they are not the replica's; averaged weights go before.
            tested: parts of the test that are done.
            states: the workers', worker 0's first; None: those that they have handed in.
        """
        with self._world.activity.doing("testing the model", takes_long=True):
            states = self._leader.workers.in_order if states is None else states
            found = self._presentation.evaluate(states, presented, tested)
        self.found, self.tested_epochs = found, epoch
        self._emitter.say(
            Evaluated(time_s=0, epoch=epoch, test_loss=found.loss, test_top1=found.top1, test_top5=found.top5)
        )
        if left_out := left_out_of(self.job.dataset.train, self.job.dataset.test):
            self._emitter.say(Notice(time_s=0, text=f"worker {LEADER}: {left_out}"))
        # A first epoch may be all warm-up; by a quarter of the run something must have been learned.
        if not self._told_of_guessing and 4 * epoch >= self.job.learning.epochs and found.guesses:
            self._told_of_guessing = True
            self._emitter.say(Notice(time_s=0, text=f"after epoch {epoch} {found.guesses}"))

    def snapshot(self, epoch: int, step: int, presented: Tensor | None = None) -> Snapshot | None:
        """Copy the run's state, if it is kept; what workers and servers hand in is a copy already.

        Args:
            epoch: epochs that are over.
            step: steps that the leader has done.
            presented: `(size,)`, the parameters that were tested, where they are not the replica's.
        """
        if self._archivist is None:
            return None
        self._archivist.wait()  # before there is one more copy
        average = {} if self._presentation.average is None else self._presentation.average.state_dict()
        self._replica.part.check_servers()
        return Snapshot(
            epoch=epoch,
            step=step,
            seconds=self._emitter.total_s,
            parameters=self._replica.flat.vector.detach().to("cpu", copy=True),
            workers=dict(self._leader.workers.states),
            servers=self._leader.servers.ask(),
            average={name: value.detach().to("cpu", copy=True) for name, value in average.items()},
            presented=None if average or presented is None else presented.detach().to("cpu", copy=True),
            begun=self.job.begun,
            deal={} if (deal := self._leader.deal) is None else deal.state(),
        )

    def save(self, snapshot: Snapshot | None, *, tested: bool = False) -> None:
        """Has the run's state written.

        Args:
            snapshot: nothing of it may change any more; None: it is not kept.
            tested: whether the newest test was of this model.
        """
        if self._archivist is not None and snapshot is not None:
            self._archivist.begin(snapshot, self.found.top1 if tested and self.found is not None else None)

    def finish(self, epochs: int) -> None:
        """Test and save the final model, after so many epochs."""
        self.evaluate(epochs)
        if self.job.checkpointing.folder is not None:
            path = self.job.checkpointing.folder / "model.safetensors"
            return_freed()  # of the test: a network that hardly fits is copied now
            self._presentation.save(path, self._leader.workers.in_order, self.job.checkpointing.claim)
        if self._archivist is not None and self.found is not None:
            self._archivist.tested(self.found.top1)

    def keep_predictions(self) -> None:
        """Write down what the final model says of every test picture; where that cannot be written, say so.

        After all else, so that the last bytes of a disk are for what a run cannot do without.
        """
        found, dataset, learning = self.found, self.job.dataset, self.job.learning
        folder = self.job.checkpointing.folder
        if folder is None or found is None or not len(found.predicted):
            return
        transform = learning.transform
        keys = partial(sample_keys, "transform", learning.seed, 0)
        augment = (
            None if transform is None else lambda images: transform(images, keys(torch.arange(len(images))))
        )
        texts = {
            PREDICTIONS_FILE: predictions_csv(found, dataset.test.labels, dataset.classes),
            PICTURES_FILE: pictures_json(found, dataset, augment),
        }
        claim = self.job.checkpointing.claim
        for name, text in texts.items():
            try:
                claim.write(folder / name, text)
            except OSError as error:
                said = f"{name} could not be written ({error.strerror or error})"
                self._emitter.say(Notice(time_s=0, text=said))

    def wait(self) -> None:
        """Wait until no checkpoint is under way."""
        if self._archivist is not None:
            self._archivist.wait()

    def _employed(self) -> Archivist | None:
        if self._archive is None or not self.job.checkpointing.checkpoints:
            return None
        return Archivist(
            self._archive, self._world.activity, self._emitter.say, beside=self._world.pace is None
        )


class Presentation:
    """Shows a replica with averaged weights, if it keeps them, and with everybody's batch-norm statistics.

    Args:
        job: what is learned.
        replica: the leader's.

    Attributes:
        average: the moving average of the weights, if the job wants one.
    """

    def __init__(self, job: Job, replica: Replica) -> None:
        self._job = job
        self._replica = replica
        decay = job.learning.weight_average
        self.average = WeightAverage(replica.flat.vector, decay) if decay else None

    def evaluate(
        self,
        states: list[WorkerState],
        presented: Tensor | None = None,
        tested: Sequence[PartialEvaluation] = (),
    ) -> Evaluation:
        """Test the model.

        Args:
            states: the workers', worker 0's first.
            presented: `(size,)`, the parameters to test, where they are not the replica's; averaged weights go before.
            tested: parts of the test that are done; of some that overlap the first one counts.
        """
        dataset = self._job.dataset
        with self._shown(states, presented):
            test = InDtype(dataset.test, self._replica.flat.vector.dtype)
            return evaluate(
                self._replica.model,
                test,
                classes=dataset.classes,
                batch_size=tested_at_once(self._job),
                device=self._job.device,
                tested=disjoint(tested),
            )

    def save(self, path: Path, states: list[WorkerState], claim: Unclaimed = UNCLAIMED) -> None:
        """Write the model's weights, and what is needed to use them."""
        with self._shown(states):
            save_weights(self._replica.model, path, self._job.weight_facts, claim)

    @contextmanager
    def _shown(self, states: list[WorkerState], presented: Tensor | None = None) -> Iterator[None]:
        vector, buffers = self._replica.flat.vector, self._replica.buffers
        others = self.average is not None or presented is not None
        trained = vector.clone() if others else None
        own = {name: value.clone() for name, value in buffers.items()}
        if self.average is not None:
            vector.copy_(self.average.value)
        elif presented is not None:
            vector.copy_(presented)
        for name, value in mean_buffers(states).items():
            buffers[name].copy_(value)
        try:
            yield
        finally:
            if trained is not None:
                vector.copy_(trained)
            for name, value in own.items():
                buffers[name].copy_(value)

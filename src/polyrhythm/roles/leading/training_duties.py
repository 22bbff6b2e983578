"""Work of the coordinator for a training run: tests, checkpoints, the run's results and its recording.

`RunFigures` makes the results and the recording of a finished run. `Inheritance` is the unfinished work of a failed
coordinator, and how its replacement finishes it:

where replicas are identical       the present parameters are tested and saved
where each has its own model       the models handed in at the end of an epoch (`Stock`), before regrouping

Batch-norm statistics, accounts and states are handed in again by the workers, the average of the weights is in the
archive, the parameters are on the servers, and the ledger lists what has been announced: nothing is announced twice.

`CheckpointCollector` collects a checkpoint of all ranks, and tests the model, in place or while steps continue. By the
result of a test the best checkpoint is known. The tested and saved model is not
always the trained one: `Presentation` puts averaged weights and the mean batch-norm statistics of all
workers in its place.
"""

from __future__ import annotations

from collections import deque
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
from polyrhythm.errors import RequestError, printable
from polyrhythm.evaluation.evaluate import Evaluation, InDtype, PartialEvaluation, disjoint, evaluate
from polyrhythm.evaluation.predictions import (
    PICTURES_FILE,
    PREDICTIONS_FILE,
    pictures_json,
    predictions_csv,
)
from polyrhythm.events import CheckpointSaved, Evaluated, Event, ImagesLeftOut, Notice, RunEnded, RunStarted
from polyrhythm.models.weights import save_weights
from polyrhythm.roles import result
from polyrhythm.roles.checkpointing.archive import Archive, Archivist, Snapshot, counted_steps
from polyrhythm.roles.checkpointing.handing_over import adopted
from polyrhythm.roles.checkpointing.mirror import Mirror
from polyrhythm.roles.checkpointing.model_snapshot import ModelSnapshot
from polyrhythm.roles.checkpointing.recording import ARRIVALS_FILE, recording_of
from polyrhythm.roles.checkpointing.worker_state import WorkerState, mean_buffers
from polyrhythm.roles.control_plane import Boundary, EvaluatesPart
from polyrhythm.roles.deal import MOST_STEPS, Deal, deal_communicator
from polyrhythm.roles.job import Job, tested_at_once
from polyrhythm.roles.leading.evaluator import Evaluator, ModelTest
from polyrhythm.roles.leading.leader import Duties, EventEmitter, Leader
from polyrhythm.roles.leading.state_collector import StateCollector
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.strategy import RecutsServers, Remarks
from polyrhythm.strategies.worker_part import WorkerPart
from polyrhythm.training.checkpoint import restoring
from polyrhythm.training.memory import return_freed
from polyrhythm.training.weight_averaging import WeightAverage

_Tested = dict[str, Any]
"""JSON-able result of a test, `Evaluation.to_json`, with `files`: names of images that could not be read."""
_MOST_TESTS = 1000
"""Newest results that a checkpoint holds: more than ranks have until they find their launcher dead, within seconds."""


class TrainingDuties(Duties):
    """Duties of the coordinator in training: tests, checkpoints, and the results of the run.

    Args:
        job: training job.
        world: context of this rank.
        replica: replica of this worker.
        ledger: record of the run so far.

    Attributes:
        job: training job; once a checkpoint has been read, with the progress that it records.
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
        self._reported_end = False
        self._too_few: int | None = None
        """Number of remaining workers when there were too few."""
        self._images_before: int | None = None
        """Images that counted as done in the checkpoint from which this run resumes."""
        self._resumed_step: int | None = None
        self._ended_epochs = 0
        """Number of epochs that this coordinator has ended."""
        self._untested: Snapshot | None = None
        """Checkpoint from which this run resumes, where its run was killed before its model was tested."""
        self._untested_before: list[ModelSnapshot] = []
        """Models of earlier steps that the run from which this one resumes had not tested."""
        self._unlogged: list[Evaluated] = []
        """Results that the run from which this one resumes had not logged."""

    def attach(self, leader: Leader) -> None:
        super().attach(leader)
        self._figures = RunFigures(self.job, self._world, self._replica, leader)
        self._collector = CheckpointCollector(
            self.job, self._world, self._replica, leader, self._emitter, self._ledger
        )
        if self._world.ledger is not None:
            self._continue(self._ledger.begun)

    @property
    def begun(self) -> Begun:
        return self.job.begun

    @property
    def elapsed_s(self) -> float:
        return self._emitter.elapsed_s

    @property
    def paused_s(self) -> float:
        return self._emitter.paused_s

    def emit(self, event: Event) -> None:
        """Emit a loss or a replacement; stop the run where too few workers remain."""
        self._emitter.emit(event)
        attendance, tolerance = self.leader.attendance, self.job.fault_tolerance
        left = len(attendance.present)
        absent = {*range(self.job.workers)} - attendance.present
        returning = sum(attendance.losses(worker) <= tolerance.restarts for worker in absent)
        if left + returning < tolerance.min_workers:
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
            snapshot, remark = adopted(snapshot, self.job, self._replica.plan)
            self._collector.remarks.append(remark)
        self._continue(snapshot.begun)
        logged = self.job.checkpointing.tested
        if logged is not None:
            self._unlogged = [test for test in snapshot.tests if test.epoch > logged]
        tested = max([logged or 0, *(test.epoch for test in self._unlogged)])
        if same and self._lacks_test(snapshot, tested):
            self._untested = snapshot
        if self.job.draws:
            self._deal_from(snapshot.deal, begun_in=snapshot.epoch)
        own_size, size = self._replica.flat.size, snapshot.parameters.numel()
        if own_size != size:
            raise RequestError(
                f"the checkpoint has {size:,} parameters, and the network {own_size:,}: resume with the classes and "
                "the model that the run was begun with, or start a new run"
            )
        self._replica.flat.vector.copy_(snapshot.parameters)
        self._untested_before = [model for model in snapshot.untested if model.epoch > tested]
        for model in self._untested_before:
            model.check_fits(own_size, self._replica.buffers)
        replicated = self._replica.part.replicated
        behind = snapshot.behind(self.job.workers)
        others = {
            worker: replace(snapshot.worker(worker, replicated), behind=worker in behind)
            for worker in range(1, self.job.workers)
        }
        own = snapshot.worker(0, replicated)
        self._images_before, self._resumed_step = self._images_done(snapshot), snapshot.step
        servers, strategy = snapshot.servers, self.job.strategy
        if isinstance(strategy, RecutsServers):
            servers = strategy.recut(servers, self._replica.plan)
        self.leader.send_states(others, servers, behind)
        self._emitter.earlier_s = snapshot.seconds
        return own

    def _images_done(self, snapshot: Snapshot) -> int | None:
        """Return the images of the run that count as done in a checkpoint; None where they are unknown."""
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
        assert self._ledger.began_at_s is not None, (
            "a coordinator is replaced only after training has started"
        )
        self._emitter.take_up(self._ledger.began_at_s)

    def inherit(self) -> None:
        """Test and save the states handed in at the end of an epoch, before workers continue."""
        self._inheritance.take_up()

    def begin(self, epoch: int) -> None:
        """Announce that training starts, unless that has been announced."""
        self._ended_epochs = epoch
        if self._ledger.began:
            return
        folder = self.job.checkpointing.folder
        if folder is not None:  # of the run that is resumed
            self.job.checkpointing.claim.remove(folder / ARRIVALS_FILE)
        self._emitter.begin()
        opening = self._figures.opening(epoch, self._emitter.earlier_s)
        opening = replace(opening, images_before=self._images_before, resumed_step=self._resumed_step)
        self._emitter.emit(opening if self.deal is None else replace(opening, deal=self.deal.opening))
        strategy, dataset = self.job.strategy, self.job.dataset
        of_strategy = strategy.remark(self.job.workers) if isinstance(strategy, Remarks) else ""
        outlook = self._replica.outlook
        of_stages = "" if outlook is None else outlook.text
        if dataset.skipped:
            files = list(map(printable, dataset.skipped))
            self._emitter.emit(ImagesLeftOut(time_s=0, text=dataset.remark, files=files))
        of_data = "" if dataset.skipped else dataset.remark
        for remark in (of_strategy, of_stages, of_data, self.job.evaluation.remark, *self._collector.remarks):
            if remark:
                self._emitter.emit(Notice(time_s=0, text=remark))
        self._collector.announce_again(self._unlogged)
        before, self._untested_before = self._untested_before, []
        for model in before:
            self._collector.evaluate_model(model)
            self._stop_where_reached()
        if (untested := self._untested) is not None:
            self._untested = None
            states = [state for _, state in sorted(untested.workers.items())]
            self._collector.evaluate(untested.epoch, untested.step, untested.presented, states=states)
            self._stop_where_reached()

    def _lacks_test(self, snapshot: Snapshot, tested: int) -> bool:
        """Return whether a checkpoint is of the end of an epoch that the saving run could not test."""
        epoch = snapshot.epoch
        if self.job.checkpointing.tested is None or not tested < epoch < self.job.learning.epochs:
            return False
        return self.job.draws or snapshot.step == self.job.calendar.start(epoch)

    def _stop_where_reached(self) -> None:
        collector = self._collector
        if collector.reached and not self._reported_end:
            self._reported_end = True
            text = (
                f"the test after epoch {collector.tested_epochs} has reached {self.job.until}: training ends"
            )
            self._emitter.emit(Notice(time_s=0, text=text))
            self._world.stop.request()

    def after_step(self) -> None:
        self._collector.step_done()
        if self.job.evaluation.continues:
            self._stop_where_reached()

    def state_due(self, done: int, epochs: int) -> bool:
        return self._collector.due(done)

    def state_received(self, state: WorkerState) -> None:
        self._collector.states.take(state)

    def boundary(
        self,
        why: Boundary,
        record: WorkerState,
        epochs: int,
        presented: Tensor | None,
        test: EvaluatesPart | None = None,
    ) -> None:
        """Test and save where an epoch or this session is over, or the failed coordinator had not done so."""
        step = record.account.step
        if why is Boundary.EPOCH:
            self._end_epoch(epochs, step, presented, test)
        elif why is Boundary.CHECKPOINT:
            self._collector.begin(self._epochs_before(step), step, awaits=True)
        elif why is Boundary.STOP:
            self._end_early(step)
        elif self._world.rejoins:
            self._inheritance.finish(step)

    def end(self) -> None:
        """Release the servers, test and save the final model, release the workers, and announce the end of the run."""
        self._replica.part.release()
        self.leader.servers.wait()
        trained_s = self._emitter.trained_s
        self._collector.await_tests()
        reached = self._collector.reached
        stopped = self._figures.stopped and not reached
        if not stopped:
            self._collector.finish(self._collector.tested_epochs if reached else self.job.learning.epochs)
        self._collector.wait()
        if stopped and self._too_few is not None:
            raise self.job.too_few(self._too_few)
        outcome = "interrupted" if stopped else "done"
        stopped_by_test = self._collector.kept is not None and self._figures.stopped
        ended_by_test = stopped_by_test and self.job.evaluation.continues
        self._figures.keep_arrivals("ended by a test while steps continued" if ended_by_test else outcome)
        if not stopped:
            self._collector.keep_predictions()
        spent = Spent(self._emitter.total_s, trained_s)
        figures = self._figures.result(spent, self._collector.found)
        if self.job.until is not None:
            figures["reached"] = reached or self._collector.reached
        self._emitter.emit(RunEnded(time_s=0, outcome=outcome, result=figures))
        self.leader.dismiss()  # last: until then a replacement of this rank finds the others

    def _end_epoch(
        self, epochs: int, step: int, presented: Tensor | None, test: EvaluatesPart | None
    ) -> None:
        """Evaluate and save, with the other workers' states: those of this step in lockstep, else the latest.

        Work of a failed coordinator is not repeated, though its replacement may have had to repeat steps.
        """
        leader = self.leader
        self._ended_epochs = epochs
        last = epochs == self.job.learning.epochs
        leader.read()
        if last and self.deal is not None:
            leader.wait_for_work_done()
        elif last:  # receive from slower workers while they train, not only later
            leader.wait_for_step(step)
        paused_at = self._world.clock.now()
        tests = (
            not last and epochs > self._ledger.tested_epochs and self._collector.kept is None
        )  # the final model is tested when all have left
        own = self._collector.test(test) if tests and test is not None else None
        if self._in_step:
            leader.wait_for_step(step)
        if tests:
            self._collector.evaluate(
                epochs, step, presented, [] if own is None else [own, *self._tested(step)]
            )
            self._stop_where_reached()
        due = self._collector.due(step) or self.job.checkpointing.due_after(epochs, last=last)
        if due and epochs > self._ledger.saved_epochs:
            self._collector.begin(epochs, step, presented, tested=tests)
        if last:  # before the servers are released
            self._collector.complete()
        self._emitter.paused_s += self._world.clock.now() - paused_at

    def _tested(self, step: int) -> list[PartialEvaluation]:
        """Return the results of workers that hold the same model, after `step` steps."""
        others = [state for state in self._figures.states if state.account.worker != LEADER]
        return [
            PartialEvaluation.from_tensors(state.tested)
            for state in others
            if state.tested and state.account.step == step
        ]

    def _end_early(self, step: int) -> None:
        """Save, once every worker has stopped."""
        calendar = self.job.calendar
        if self._in_step:
            self.leader.wait_for_step(step)
        elif self.deal is not None:
            self.leader.wait_for_work_done()
        else:
            self.leader.wait_for_stop(calendar.total_steps)
        self._collector.begin(self._epochs_before(step), step)
        self._collector.complete()
        self._collector.wait()

    def _epochs_before(self, step: int) -> int:
        """Return the number of whole epochs before a step of the coordinator."""
        return self.job.calendar.epoch_of(step) if self.deal is None else self._ended_epochs

    @property
    def _inheritance(self) -> Inheritance:
        return Inheritance(self.job, self._replica, self.leader, self._collector, self._emitter, self._ledger)

    def _deal_from(
        self, stated: dict[str, Any], drawn: Sequence[tuple[int, ...]] = (), begun_in: int = 0
    ) -> None:
        """Make the deal, as recorded where a run resumes after `begun_in` epochs, with the batches drawn since."""
        dealer = self.job.dealer(stated)
        for unit, *grant in drawn:
            dealer.note(unit, Grant(*grant))
        self.deal = Deal(
            dealer,
            self.job.units,
            deal_communicator(self._world),
            self._world.clock.now,
            self._emitter.emit,
            begun_in,
        )

    def _continue(self, begun: Begun) -> None:
        """Continue with the recorded progress in unfinished epochs."""
        self.job = self._figures.job = self._collector.job = self.job.continued(begun)


def training_leader(job: Job, world: World, replica: Replica) -> Leader:
    """Return the control plane of worker 0 in training.

    Args:
        job: training job.
        world: context of this rank.
        replica: replica of this worker.
    """
    ledger = world.ledger or Ledger.of(job.workers)
    return Leader(world, job.strategy, TrainingDuties(job, world, replica, ledger), ledger, replica)


@dataclass(frozen=True)
class Unfinished:
    """Unfinished work of a failed coordinator for the last epoch that it had completed.

    Attributes:
        epochs: number of finished epochs.
        test: whether the model has not been tested.
        save: whether no checkpoint has been written.
        is_last: whether this was the last epoch.
        at_its_end: whether no step has been done since.
    """

    epochs: int
    test: bool
    save: bool
    is_last: bool
    at_its_end: bool


@dataclass(frozen=True)
class Stock:
    """States of the other workers at the end of an epoch, handed in to the failed coordinator and its replacement.

    Attributes:
        states: states of the workers; that of one of them stands for worker 0's.
        first: `(size,)`, model of the first of them.
        mean: `(size,)`, mean of all their models.
    """

    states: dict[int, WorkerState]
    first: Tensor
    mean: Tensor


class Inheritance:
    """Unfinished work that a new coordinator takes over.

    Args:
        job: training job, with the recorded progress.
        replica: replica of the coordinator.
        leader: coordinator, which receives from the other workers.
        collector: collector that tests and saves.
        emitter: emitter of notices about deviations.
        ledger: record of the run so far.
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
        """Test and save the other workers' states at the end of an epoch, where each has its own model."""
        if self._has_stock:
            self._leader.await_introductions()
            self._finish_with_stock()

    def finish(self, step: int) -> None:
        """Test and save where the failed coordinator had not, with the present parameters.

        Args:
            step: steps of the coordinator that count.
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
        if missing.test and self._job.evaluation.continues and not missing.at_its_end:
            text = f"worker 0 was lost before the model was tested after epoch {missing.epochs}: that test is skipped"
            self._emitter.emit(Notice(time_s=0, text=text))
        elif missing.test:
            if not (missing.at_its_end and self._agree):
                text = (
                    f"worker 0 was lost before the model was tested after epoch {missing.epochs}: its replacement "
                    "tests "
                    "the parameters as they are now"
                )
                self._emitter.emit(Notice(time_s=0, text=text))
            self._collector.evaluate(missing.epochs, step, presented)
        if missing.save and (missing.at_its_end or not self._regroups):
            # Otherwise they have states of several steps.
            self._collector.begin(missing.epochs, step, presented, tested=missing.test)
            self._collector.complete()
        if not self._regroups:  # workers in lockstep wait for this
            self._replica.part.catch_up()

    @property
    def _has_stock(self) -> bool:
        """Whether the others have handed in models of their own."""
        return self._regroups and not self._agree and not self._collector.averages

    def _finish_with_stock(self) -> None:
        """Test and save the other workers' states at the end of an epoch, if that is missing."""
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
            self._collector.evaluate(missing.epochs, step, mean)
            self._ledger.tested_epochs = missing.epochs
        if missing.save:
            self._collector.begin(missing.epochs, step, mean, tested=missing.test, stock=stock)
            self._collector.complete()
            self._ledger.saved_epochs = missing.epochs

    def _missing(self, step: int) -> Unfinished:
        epochs = None if (deal := self._leader.deal) is None else deal.epoch_of(LEADER, step)
        return unfinished(self._ledger, self._job, step, epochs)


def stock_of(states: dict[int, WorkerState], part: WorkerPart, step: int) -> Stock | None:
    """Return the states handed in after a step; None where no worker has handed in its own model.

    Args:
        states: states of the workers.
        part: worker part of the coordinator, which can read them.
        step: step at the end of an epoch.
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


def unfinished(ledger: Ledger, job: Job, step: int, drawn_epochs: int | None = None) -> Unfinished:
    """Return the unfinished work of the previous epochs.

    Args:
        ledger: record of the run so far.
        job: training job.
        step: steps of the coordinator that count.
        drawn_epochs: number of epochs before that of the coordinator's next batch, where batches are drawn.
    """
    epochs = job.calendar.epoch_of(step) if drawn_epochs is None else drawn_epochs
    last = epochs == job.learning.epochs  # the final model is tested when all have left
    return Unfinished(
        epochs,
        test=epochs > ledger.tested_epochs and not last,
        save=epochs > ledger.saved_epochs and job.checkpointing.due_after(epochs, last=last),
        is_last=last,
        at_its_end=drawn_epochs is None and step == job.calendar.start(epochs),
    )


def tested_before(ledger: Ledger) -> Evaluation | None:
    """Return the result of the newest test, without that of each class, which the ledger does not contain."""
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
    """Continue with the average of the newest checkpoint, or begin one at the present parameters."""
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
    """Time of a run.

    Attributes:
        seconds: total, including that of the runs that it resumes.
        trained_s: time of this session, without the coordinator's tests.
    """

    seconds: float
    trained_s: float


class RunFigures:
    """Results of a run, as known to the coordinator.

    Args:
        job: training job.
        world: context of this rank.
        replica: replica of the coordinator.
        leader: coordinator, with the reports of all ranks.

    Attributes:
        job: training job, with the recorded progress.
    """

    def __init__(self, job: Job, world: World, replica: Replica, leader: Leader) -> None:
        self.job = job
        self._world = world
        self._replica = replica
        self._leader = leader

    @property
    def states(self) -> list[WorkerState]:
        """Latest state of every present worker, in the workers' order."""
        return self._leader.workers.in_order

    @property
    def stopped(self) -> bool:
        """Whether a worker was stopped early."""
        return any(state.account.stopped for state in self.states)

    def opening(self, epoch: int, earlier_s: float) -> RunStarted:
        """Return the event that announces the start of training.

        Args:
            epoch: epoch in which it starts.
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
        """Write the order of all received messages, so that the run can be replayed."""
        folder = self.job.checkpointing.folder
        if folder is None or self._world.arrivals is None:
            return
        roles = self._world.roles
        stated = {roles.workers[state.account.worker]: state.account.arrivals for state in self.states}
        stated |= {rank: report["arrivals"] for rank, report in self._leader.servers.reports.items()}
        # With messages that this rank received while others left.
        stated[self._world.network.rank] = self._world.arrivals.to_json()
        ranks = {rank: Arrivals.from_json(entry) for rank, entry in stated.items() if entry}
        digest = result.digest(self._replica.flat.vector)
        lost = self._leader.attendance.lost
        deal = None if self._leader.deal is None else self._leader.deal.grants
        recording_of(
            self.job, roles, ranks, outcome=outcome, parameters_sha256=digest, workers_lost=lost, deal=deal
        ).write(folder, self.job.checkpointing.claim)

    def result(self, spent: Spent, found: Evaluation | None) -> dict[str, Any]:
        """Return the results, as `train --json` prints them.

        Args:
            spent: time of the run.
            found: result of the last test, if there was one.
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
            "steps": max(account.step for account in accounts),
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
            **result.traffic_figures(accounts, reports, attendance.steps_of_lost),
            "staleness": result.staleness_figures(accounts, reports),
            **result.defense_figures(reports),
            **self._leader.difference_figures,
            "parameters_sha256": result.digest(self._replica.flat.vector),
            **self._of_stages(),
        }

    def _of_stages(self) -> dict[str, Any]:
        """Return the predictions for the stages of a pipeline, and the memory used by each."""
        outlook = self._replica.outlook
        if outlook is None:
            return {}
        taken = {state.account.worker: state.account.peak_bytes for state in self.states}
        if self._replica.peak is not None:  # it has written the network since
            taken[LEADER] = self._replica.peak()
        return {
            "pipeline": outlook.to_json() | {"measured_bytes": [taken[worker] for worker in sorted(taken)]}
        }

    def _epochs_done(self, step: int) -> float:
        """Return the number of epochs done."""
        deal, job = self._leader.deal, self.job
        if deal is None:
            return job.calendar.epochs_done(step)
        *whole, last = job.deck.images
        an_epoch = whole[0] if whole else last if job.learning.updates is None else len(job.dataset.train)
        left = 0
        if self.stopped:  # else batches left by failed workers are reported separately
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
                lost = result.images_of_lost(self.job, view.missed, view.since)
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
        """Return the steps that count of every worker: by its own report, or by the servers' for a failed one."""
        done = {state.account.worker: state.account.step for state in self.states}
        for worker, rank in enumerate(self._world.roles.workers):
            stated = [report["steps"] for report in self._leader.servers.reports.values()]
            held = [
                steps[str(rank)] for steps in stated if str(rank) in steps
            ]  # a site knows of its own only
            done.setdefault(worker, min(held, default=self._leader.attendance.last_step(worker)))
        return done


class CheckpointCollector:
    """Tests and saves on behalf of the coordinator.

    Args:
        job: training job.
        world: context of this rank.
        replica: replica of the coordinator.
        leader: coordinator, which has the workers' states, and requests those of the servers.
        emitter: emitter of the events of tests and checkpoints.
        ledger: record of the run so far.

    Attributes:
        job: training job, with the recorded progress.
        found: result of the newest test, if there was one.
        tested_epochs: number of finished epochs at that test.
        kept: model that has reached the target; None: there is none.
        states: collector of the states of workers and servers.
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
        self._mirror = self._mirrored()
        self.states = StateCollector(job.checkpointing.every, leader, job.traits, world.clock.now)
        self._begun: Snapshot | None = None
        self._begun_top1: float | None = None
        self.found = tested_before(ledger)
        self.tested_epochs = ledger.tested_epochs
        self.kept: ModelSnapshot | None = None
        self._tests: deque[Evaluated] = deque(maxlen=_MOST_TESTS)
        self._reported_guessing = False
        self._evaluator: Evaluator | None = None
        if job.evaluation.continues:
            self._evaluator = Evaluator(world, emitter.emit, skips=job.evaluation.skips)

    @property
    def averages(self) -> bool:
        """Whether the moving average of the weights is tested."""
        return self._presentation.average is not None

    @property
    def remarks(self) -> list[str]:
        """Remarks on the checkpoint that was loaded."""
        return [] if self._archive is None else self._archive.remarks

    def load(self) -> Snapshot:
        """Read the newest checkpoint, and continue with its average."""
        assert self._archive is not None, "a resumed run has a folder"
        snapshot = self._archive.load()
        if self._presentation.average is not None and snapshot.average:
            self._presentation.average.load_state_dict(snapshot.average)
        return snapshot

    def inherit(self) -> None:
        """Continue with the failed coordinator's average of the weights, as far as it is known."""
        if self._presentation.average is not None:
            inherit_average(self._presentation.average, self._archive, self._replica)

    @property
    def reached(self) -> bool:
        """Whether the newest test has reached the target."""
        until, found = self.job.until, self.found
        return (
            until is not None
            and found is not None
            and until.reached(loss=found.loss, top1=found.top1, top5=found.top5)
        )

    def step_done(self) -> None:
        """Keep the weight average, for which the step must be over."""
        if self._evaluator is not None:
            self._evaluator.look()
        if self._archivist is not None:
            self._archivist.look()
            if self._mirror is not None:
                self._mirror.look()
            if self.states.open:
                self._leader.read()
                self._advance()
        if self._presentation.average is not None:
            self._replica.settle()
            self._presentation.average.update(self._replica.flat.vector)

    def test(self, part: EvaluatesPart) -> PartialEvaluation:
        """Return the result of this worker's part of a test."""
        with self._world.activity.doing("testing the model", takes_long=True):
            return part()

    def evaluate(
        self,
        epoch: int,
        step: int,
        presented: Tensor | None = None,
        tested: Sequence[PartialEvaluation] = (),
        states: list[WorkerState] | None = None,
    ) -> None:
        """Test the model: in place, or a copy of it while steps continue.

        Args:
            epoch: number of finished epochs.
            step: steps done by the coordinator.
            presented: `(size,)`, the parameters to test, where they are not the replica's; averaged weights take
                precedence.
            tested: finished parts of the test.
            states: states of the workers, worker 0's first; None: those that they have handed in.
        """
        states = self._leader.workers.in_order if states is None else states
        copied = partial(self._presentation.copied, epoch, step, self._emitter.elapsed_s, states, presented)
        if self._evaluator is not None:
            self.evaluate_model(copied())
            return
        self._evaluate_in_place(epoch, step, states, presented, tested)
        if self.reached:  # the workers may take another step before all have stopped
            self.kept = copied()

    def evaluate_model(self, model: ModelSnapshot) -> None:
        """Test a copy of the model of an earlier step, while steps continue, if that is enabled."""
        if self._evaluator is None:
            with self._world.activity.doing("testing the model", takes_long=True):
                self._take_test(model, self._presentation.evaluate_model(model))
            return
        if self._archive is not None and self._archive.keeps_best:
            self._archive.awaited |= {model.step}
        self._evaluator.begin(ModelTest(model, self._presentation.evaluate_model, self._take_test))

    @property
    def _awaiting_test(self) -> list[ModelSnapshot]:
        """Models that a resumed run tests: without a result, or with one by which the run is about to end."""
        pending = [] if self._evaluator is None else self._evaluator.pending
        return pending if self.kept is None else [self.kept, *pending]

    def announce_again(self, tests: list[Evaluated]) -> None:
        """Announce results of an earlier session that its log lacks."""
        self._tests.extend(tests)
        for test in tests:
            self._emitter.emit(test)

    def await_tests(self) -> None:
        """Wait for the results of all tests."""
        if self._evaluator is not None:
            self._evaluator.wait()

    def _evaluate_in_place(
        self,
        epoch: int,
        step: int,
        states: list[WorkerState],
        presented: Tensor | None = None,
        tested: Sequence[PartialEvaluation] = (),
    ) -> None:
        with self._world.activity.doing("testing the model", takes_long=True):
            found = self._presentation.evaluate(states, presented, tested)
        pace = self._world.pace
        if pace is not None and pace.evaluation_s:
            by_others = sum(len(part.predicted) for part in tested) / max(1, len(self.job.dataset.test))
            pace.clock.sleep(pace.evaluation_s * max(0.0, 1 - by_others), "test")
        self._note(found, epoch, step, left_out_of(self.job.dataset.train, self.job.dataset.test))

    def _take_test(self, model: ModelSnapshot, tested: _Tested) -> None:
        """Record the result of a test of an earlier step."""
        files = tested["files"]
        found = Evaluation.from_json({name: value for name, value in tested.items() if name != "files"})
        self._note(found, model.epoch, model.step, files, snapshot_s=model.taken_s)
        if self._archive is not None and model.step in self._archive.awaited:
            assert self._archivist is not None, "the best checkpoint is kept where there are any"
            self._archivist.rate(model.step, found.top1)
            self._archive.awaited -= {model.step}
        if self.reached:
            self.kept = model
            if self._evaluator is not None:
                self._evaluator.drop()

    def _note(
        self, found: Evaluation, epoch: int, step: int, files: list[str], snapshot_s: float | None = None
    ) -> None:
        self.found, self.tested_epochs = found, epoch
        results = {"test_loss": found.loss, "test_top1": found.top1, "test_top5": found.top5}
        test = Evaluated(time_s=0, epoch=epoch, step=step, snapshot_s=snapshot_s, **results)
        self._emitter.emit(test)
        if not self.reached:  # else a resumed run tests that model again, and ends
            self._tests.append(test)
        if files:
            self._emitter.emit(ImagesLeftOut.of_worker(LEADER, files))
        # A first epoch may be all warm-up; by a quarter of the run something must have been learned.
        if not self._reported_guessing and 4 * epoch >= self.job.learning.epochs and found.guesses:
            self._reported_guessing = True
            self._emitter.emit(Notice(time_s=0, text=f"after epoch {epoch} {found.guesses}"))

    def due(self, done: int) -> bool:
        """Return whether a checkpoint is due after `done` steps of the coordinator, by its interval."""
        return self._archivist is not None and self.states.due(done, 0)

    def begin(
        self,
        epoch: int,
        step: int,
        presented: Tensor | None = None,
        *,
        awaits: bool = False,
        tested: bool = False,
        stock: Stock | None = None,
    ) -> None:
        """Copy this rank's state and begin to collect the others', which are copies; the checkpoint follows.

        Args:
            epoch: number of finished epochs.
            step: steps done by the coordinator.
            presented: `(size,)`, the parameters that were tested, where they are not the replica's.
            awaits: whether the other workers' states of this step are still to arrive; no second one is begun then.
            tested: whether the newest test was of this model.
            stock: states of all workers and model of the first; None: those that they send, and the replica's.
        """
        if self._archivist is None or (awaits and self.states.open):
            return
        if not self.states.awaits_workers:  # where several epochs end at once, each is saved
            self.complete()
        average = {} if self._presentation.average is None else self._presentation.average.state_dict()
        self._replica.part.check_servers()
        own = self._replica.flat.vector if stock is None else stock.first
        self._begun = Snapshot(
            epoch=epoch,
            step=step,
            seconds=self._emitter.total_s,
            parameters=own.detach().to("cpu", copy=True),
            workers={},
            average={name: value.detach().to("cpu", copy=True) for name, value in average.items()},
            presented=None if average or presented is None else presented.detach().to("cpu", copy=True),
            begun=self.job.begun,
            untested=[model for model in self._awaiting_test if model.step != step],
            tests=[*self._tests],
        )
        in_place = tested and self._evaluator is None
        self._begun_top1 = self.found.top1 if in_place and self.found is not None else None
        self.states.begin(step, awaits=awaits, stock=None if stock is None else stock.states)
        self._advance()

    def complete(self) -> None:
        """Wait until the checkpoint that was begun has all states."""
        self._leader.read_until(self._advance)

    def _advance(self) -> bool:
        """Begin to write the checkpoint once all states are there; return whether none is missing."""
        held = self.states.held()
        if held is not None:
            assert self._archivist is not None, "states are collected for checkpoints"
            assert self._begun is not None, "the coordinator's state is copied first"
            workers, servers = held
            deal = {} if (deal := self._leader.deal) is None else deal.state()
            snapshot, self._begun = replace(self._begun, workers=workers, servers=servers, deal=deal), None
            self._archivist.begin(snapshot, self._begun_top1)
        return not self.states.open

    def finish(self, epochs: int) -> None:
        """Test and save the final model, after `epochs` epochs, or save the one that has reached the target."""
        states = self._leader.workers.in_order
        if self.kept is not None:
            self._presentation.become(self.kept)
        else:
            self._evaluate_in_place(epochs, states[0].account.step, states)
        if self.job.checkpointing.folder is not None:
            path = self.job.checkpointing.folder / "model.safetensors"
            return_freed()  # of the test: a network that hardly fits is copied now
            self._presentation.save(path, states, self.job.checkpointing.claim)
        if self._archivist is not None and self.found is not None and self.kept is None:
            self._archivist.tested(self.found.top1)

    def keep_predictions(self) -> None:
        """Write the final model's predictions for every test image; emit a notice where they cannot be written.

        This is the last duty, so that the remaining disk space is used for more important files first.
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
                failure = f"{name} could not be written ({error.strerror or error})"
                self._emitter.emit(Notice(time_s=0, text=failure))

    def wait(self) -> None:
        """Wait until all checkpoints are written and copied."""
        for archivist in (self._archivist, self._mirror):
            if archivist is not None:
                archivist.wait()

    def _employed(self) -> Archivist[Snapshot] | None:
        if self._archive is None or not self.job.checkpointing.saves:
            return None
        return Archivist(self._archive, self._world.activity, self._emit, beside=self._world.pace is None)

    def _mirrored(self) -> Archivist[CheckpointSaved] | None:
        checkpointing, world = self.job.checkpointing, self._world
        if checkpointing.folder is None or checkpointing.mirror is None:
            return None
        mirror = Mirror(checkpointing.folder, checkpointing.mirror, checkpointing.checkpoints)
        return Archivist(mirror, world.activity, self._emit_of_mirror, beside=world.pace is None)

    def _emit(self, event: Event) -> None:
        """Emit an event of the local checkpoints, and copy a new one."""
        self._emitter.emit(event)
        if isinstance(event, CheckpointSaved) and self._mirror is not None:
            self._mirror.begin(event)

    def _emit_of_mirror(self, event: Event) -> None:
        if not isinstance(event, CheckpointSaved):  # it was announced before
            self._emitter.emit(event)


class Presentation:
    """Presents a replica with averaged weights, if it keeps them, and with mean batch-norm statistics.

    Args:
        job: training job.
        replica: replica of the coordinator.

    Attributes:
        average: moving average of the weights, if the job requires one.
    """

    def __init__(self, job: Job, replica: Replica) -> None:
        self._job = job
        self._replica = replica
        decay = job.learning.weight_average
        self.average = WeightAverage(replica.flat.vector, decay) if decay else None
        self._kept: ModelSnapshot | None = None

    def evaluate(
        self,
        states: list[WorkerState],
        presented: Tensor | None = None,
        tested: Sequence[PartialEvaluation] = (),
    ) -> Evaluation:
        """Test the model.

        Args:
            states: states of the workers, worker 0's first.
            presented: `(size,)`, the parameters to test, where they are not the replica's; averaged weights take
                precedence.
            tested: finished parts of the test; of overlapping ones the first counts.
        """
        with self._shown(states, presented):
            return self._evaluate(tested)

    def copied(
        self, epoch: int, step: int, taken_s: float, states: list[WorkerState], presented: Tensor | None
    ) -> ModelSnapshot:
        """Return a copy of the model that `evaluate` tests; `taken_s` is the time, the rest as there."""
        average = None if self.average is None else self.average.value
        shown = next(each for each in (average, presented, self._replica.flat.vector) if each is not None)
        buffers = {name: value.clone() for name, value in mean_buffers(states).items()}
        return ModelSnapshot(epoch, step, taken_s, shown.detach().to("cpu", copy=True), buffers)

    def evaluate_model(self, model: ModelSnapshot) -> _Tested:
        """Test a copy of the model, here or in a fork: no memory that is shared is written."""
        with self._replica.computing_with(model.parameters, model.buffers):
            return {**self._evaluate().to_json(), "files": left_out_of(self._job.dataset.test)}

    def become(self, model: ModelSnapshot) -> None:
        """Present a model that has reached the target from now on; the replica holds it."""
        self._kept = model
        self._replica.flat.vector.copy_(model.parameters)

    def _evaluate(self, tested: Sequence[PartialEvaluation] = ()) -> Evaluation:
        dataset = self._job.dataset
        return evaluate(
            self._replica.model,
            InDtype(dataset.test, self._replica.flat.vector.dtype, self._replica.test_waits),
            classes=dataset.classes,
            batch_size=tested_at_once(self._job),
            device=self._job.device,
            tested=disjoint(tested),
        )

    def save(self, path: Path, states: list[WorkerState], claim: Unclaimed = UNCLAIMED) -> None:
        """Write the model's weights, and the metadata needed to use them."""
        with self._shown(states):
            save_weights(self._replica.model, path, self._job.weight_facts, claim)

    @contextmanager
    def _shown(self, states: list[WorkerState], presented: Tensor | None = None) -> Iterator[None]:
        vector, held = self._replica.flat.vector, self._replica.buffers
        parameters = presented if self.average is None else self.average.value
        buffers = mean_buffers(states)
        if self._kept is not None:
            parameters, buffers = self._kept.parameters, self._kept.buffers
        trained = None if parameters is None else vector.clone()
        own = {name: value.clone() for name, value in held.items()}
        if parameters is not None:
            vector.copy_(parameters)
        for name, value in buffers.items():
            held[name].copy_(value)
        try:
            yield
        finally:
            if trained is not None:
                vector.copy_(trained)
            for name, value in own.items():
                held[name].copy_(value)

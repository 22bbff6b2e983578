"""What the leader does for a training run: it tests, saves, and makes the run's figures and its recording.

`RunFigures` makes the figures and the recording of a run that is over. `Inheritance` is what the lost leader
has left undone, and how its successor finishes it:

where all hold the same            the parameters of now are tested and saved
where each has a model of its own  what they handed in at the end of an epoch (`Stock`), before regrouping

`CheckpointCollector` collects a checkpoint of all ranks, and tests the model. The result of a test goes with the
checkpoint that is saved after it, by which the best one is known. The model as it is tested and saved is not
always the model as it is trained: `Presentation` puts averaged weights and the mean batch-norm statistics of all
workers in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyrhythm.claim import UNCLAIMED, Unclaimed
from polyrhythm.communication.arrivals import Arrivals
from polyrhythm.data.dataset import Split
from polyrhythm.data.dealing import Begun
from polyrhythm.evaluation.evaluate import Evaluation, evaluate
from polyrhythm.events import Evaluated, Event, Notice, RunEnded, RunStarted
from polyrhythm.models.weights import save_weights
from polyrhythm.roles import result
from polyrhythm.roles.control_plane import Boundary
from polyrhythm.roles.job import Job
from polyrhythm.roles.keeping.archive import Archive, Archivist, Snapshot
from polyrhythm.roles.keeping.recording import ARRIVALS_FILE, recording_of
from polyrhythm.roles.keeping.worker_state import WorkerState, mean_buffers
from polyrhythm.roles.leading.leader import Duties, EventEmitter, Leader
from polyrhythm.roles.leading.taking_over import (
    Unfinished,
    inherit_average,
    stock_of,
    tested_before,
    unfinished,
)
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.strategy import RecutsServers, Remarks
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
        self._too_few: int | None = None
        """How many workers were left when there were too few."""

    def attach(self, leader: Leader) -> None:
        """Take on the duties of a leader that has just been made."""
        super().attach(leader)
        self._figures = RunFigures(self.job, self._world, self._replica, leader)
        self._collector = CheckpointCollector(
            self.job, self._world, self._replica, leader, self._emitter, self._ledger
        )
        if self._world.ledger is not None:
            self._go_on(self._ledger.begun)

    @property
    def begun(self) -> Begun:
        """What other numbers of workers did of epochs that are not over."""
        return self.job.begun

    @property
    def elapsed_s(self) -> float:
        """Seconds since training started."""
        return self._emitter.elapsed_s

    @property
    def paused_s(self) -> float:
        """For how long the leader was away from training to test and save."""
        return self._emitter.paused_s

    def say(self, event: Event) -> None:
        """Emit a loss or a successor; stop the run where too few workers are left."""
        self._emitter.say(event)
        attendance, losses = self.leader.attendance, self.job.losses
        left = len(attendance.present)
        if left < losses.min_workers and attendance.lost > losses.restarts:
            self._too_few = left if self._too_few is None else min(left, self._too_few)
            self._world.stop.request()

    def restore(self) -> WorkerState | None:
        """Read the newest checkpoint, hand every rank its part, and return this worker's."""
        if not self.job.keeping.resume:
            return None
        snapshot = self._collector.load()
        self._go_on(snapshot.begun)
        self._replica.flat.vector.copy_(snapshot.parameters)
        replicated = self._replica.part.replicated
        behind = snapshot.behind(self.job.workers)
        others = {
            worker: replace(snapshot.worker(worker, replicated), behind=worker in behind)
            for worker in range(1, self.job.workers)
        }
        servers, strategy = snapshot.servers, self.job.strategy
        if isinstance(strategy, RecutsServers):
            servers = strategy.recut(servers, self._replica.plan)
        self.leader.hand_out(others, servers, behind)
        self._emitter.earlier_s = snapshot.seconds
        return snapshot.worker(0, replicated)

    def take_up(self) -> None:
        """Go on with the time of the run."""
        assert self._ledger.began_at_s is not None, "a leader has a successor when training has started"
        self._emitter.take_up(self._ledger.began_at_s)

    def inherit(self) -> None:
        """Test and save what others handed in at the end of an epoch, before they go on."""
        self._inheritance.take_up()

    def begin(self, epoch: int) -> None:
        """Say that training starts, unless that has been said."""
        if self._ledger.began:
            return
        folder = self.job.keeping.folder
        if folder is not None:  # of what this run goes on from
            self.job.keeping.claim.remove(folder / ARRIVALS_FILE)
        self._emitter.begin()
        self._emitter.say(self._figures.opening(epoch, self._emitter.earlier_s))
        strategy, of_data = self.job.strategy, self.job.dataset.remark
        of_strategy = strategy.remark(self.job.workers) if isinstance(strategy, Remarks) else ""
        for remark in (of_strategy, of_data, *self._collector.remarks):
            if remark:
                self._emitter.say(Notice(time_s=0, text=remark))

    def after_step(self) -> None:
        """Update the weight average, for which the step must be over."""
        self._collector.step_done()

    def boundary(self, why: Boundary, record: WorkerState, epochs: int, presented: Tensor | None) -> None:
        """Test and save where an epoch or this session is over, or the lost leader did not come to it."""
        step = record.account.step
        if why is Boundary.EPOCH:
            self._end_epoch(epochs, step, presented)
        elif why is Boundary.STOP:
            self._end_early(step)
        elif self._world.rejoins:
            self._inheritance.finish(step)

    def end(self) -> None:
        """Let the servers go, test and save the final model, let the workers go, and say that the run is over."""
        self._replica.part.let_go()
        self.leader.servers.wait()
        trained_s = self._emitter.trained_s
        stopped = self._figures.stopped
        if not stopped:
            self._collector.finish()
        self._collector.wait()
        if stopped and self._too_few is not None:
            raise self.job.too_few(self._too_few)
        outcome = "interrupted" if stopped else "done"
        self._figures.keep_arrivals(outcome)
        self.leader.let_leave()
        spent = Spent(self._emitter.total_s, trained_s)
        figures = self._figures.result(spent, self._collector.found)
        self._emitter.say(RunEnded(time_s=0, outcome=outcome, result=figures))

    def _end_epoch(self, epochs: int, step: int, presented: Tensor | None) -> None:
        """Evaluate and save, with the other workers' states: all where they go in lockstep, else the latest.

        What the lost leader did is not done again, though its successor may have had to take steps again before it.
        """
        leader = self.leader
        last = epochs == self.job.learning.epochs
        leader.read()
        if last:  # hears the slower ones while they train, and not only once the servers let go
            leader.wait_for_step(step)
        paused_at = self._world.clock.now()
        if self._in_step:
            leader.wait_for_step(step)
        if not last and epochs > self._ledger.tested_epochs:  # the final model is tested when all have left
            self._collector.evaluate(epochs, presented)
        if epochs > self._ledger.saved_epochs:
            self._collector.save(self._collector.snapshot(epochs, step, presented), tested=not last)
        self._emitter.paused_s += self._world.clock.now() - paused_at

    def _end_early(self, step: int) -> None:
        """Save, once every worker has stopped where it will stop."""
        calendar = self.job.calendar
        if self._in_step:
            self.leader.wait_for_step(step)
        else:
            self.leader.wait_for_stop(calendar.total_steps)
        self._collector.save(self._collector.snapshot(calendar.epoch_of(step), step))
        self._collector.wait()

    @property
    def _inheritance(self) -> Inheritance:
        return Inheritance(self.job, self._replica, self.leader, self._collector, self._emitter, self._ledger)

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
        """Tests and saves what the lost leader did not come to, with the parameters of now.

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
                self._emitter.say(Notice(time_s=0, text=missing.text))
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
        """Tests and saves what the others held when an epoch was over, if that is left undone: they have gone on."""
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
            kept = replace(snapshot, parameters=stock.models[0], workers=stock.states)
            self._collector.save(kept, tested=missing.test)
            self._ledger.saved_epochs = missing.epochs

    def _missing(self, step: int) -> Unfinished:
        return unfinished(self._ledger, self._job, step, saves=self._collector.saves)


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
        """Gives what is said of a run when its training starts.

        Args:
            epoch: that it starts in.
            earlier_s: seconds of training before this session.
        """
        job, cast = self.job, self._world.cast
        return RunStarted(
            time_s=0,
            strategy=str(job.strategy),
            data=job.dataset.name,
            model=job.model_name,
            workers=len(cast.workers),
            servers=len(cast.servers),
            epochs=job.learning.epochs,
            steps_per_epoch=job.steps_per_epoch,
            steps=job.calendar.total_steps,
            start_step=job.calendar.start(epoch),
            start_epoch=epoch,
            earlier_s=earlier_s,
            parameters=self._replica.flat.size,
            free_running=not job.traits.waits_for_slower,
            begun=job.begun.to_json(),
        )

    def keep_arrivals(self, outcome: str) -> None:
        """Writes down whom every rank has heard, so that the run can be replayed."""
        folder = self.job.keeping.folder
        if folder is None or self._world.arrivals is None:
            return
        cast = self._world.cast
        told = {cast.workers[state.account.worker]: state.account.arrivals for state in self.states}
        told |= {rank: report["arrivals"] for rank, report in self._leader.servers.reports.items()}
        # With what this one heard while others left.
        told[self._world.network.rank] = self._world.arrivals.to_json()
        ranks = {rank: Arrivals.from_json(entry) for rank, entry in told.items() if entry}
        digest = result.digest(self._replica.flat.vector)
        lost = self._leader.attendance.lost
        recording_of(
            self.job, cast, ranks, outcome=outcome, parameters_sha256=digest, workers_lost=lost
        ).write(folder, self.job.keeping.claim)

    def result(self, spent: Spent, found: Evaluation | None) -> dict[str, Any]:
        """Gives the figures, as `train --json` prints them.

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
            "run": str(job.keeping.folder) if job.keeping.folder is not None else None,
            "strategy": str(job.strategy),
            "data": job.dataset.name,
            "model": job.model_name,
            "workers": job.workers,
            "servers": len(self._world.cast.servers),
            "steps": accounts[0].step,
            "epochs": job.calendar.epochs_done(accounts[0].step),
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
        }

    def _images_not_seen(self) -> int:
        if self.job.faults.regroups:
            part, view = self._replica.part, self._leader.views.pending.view
            lost = 0
            if not part.replicated:
                # Workers that hold the same take a step that broke again, with all its images.
                lost = result.images_of_broken_rounds(self.job, view.missed, part.exchanges)
            return lost + result.images_left_out(self.job, view.absences)
        reports = list(self._leader.servers.reports.values())
        not_applied = result.images_not_applied(self.job, self._world.cast, reports)
        not_there = result.images_of_absent(self.job, self._world.cast, reports)
        return result.images_not_seen(self.job, self._steps_done()) + not_applied + not_there

    def _steps_done(self) -> dict[int, int]:
        """Gives the steps that count of every worker: as it says itself, or as the servers know of a lost one."""
        done = {state.account.worker: state.account.step for state in self.states}
        for worker, rank in enumerate(self._world.cast.workers):
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
        self._archive = Archive(job) if job.keeping.folder is not None else None
        self._archivist = self._employed()
        self.found = tested_before(ledger)

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
        """Goes on with the lost leader's average of the weights, as far as it is known."""
        if self._presentation.average is not None:
            inherit_average(self._presentation.average, self._archive, self._replica)

    def step_done(self) -> None:
        """Keeps the weight average, for which the step must be over."""
        if self._archivist is not None:
            self._archivist.look()
        if self._presentation.average is not None:
            self._replica.settle()
            self._presentation.average.update(self._replica.flat.vector)

    def evaluate(self, epoch: int, presented: Tensor | None = None) -> None:
        """Tests the model.

        Args:
            epoch: epochs that are over.
            presented: `(size,)`, the parameters to test, where they are not the replica's; averaged weights go before.
        """
        with self._world.activity.doing("testing the model", takes_long=True):
            found = self._presentation.evaluate(self._leader.workers.in_order, presented)
        self.found = found
        self._emitter.say(
            Evaluated(time_s=0, epoch=epoch, test_loss=found.loss, test_top1=found.top1, test_top5=found.top5)
        )

    def snapshot(self, epoch: int, step: int, presented: Tensor | None = None) -> Snapshot | None:
        """Copies the run's state, if it is kept; what workers and servers hand in is a copy already.

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
        )

    def save(self, snapshot: Snapshot | None, *, tested: bool = False) -> None:
        """Has the run's state written.

        Args:
            snapshot: nothing of it may change any more; None: it is not kept.
            tested: whether the newest test was of this model.
        """
        if self._archivist is not None and snapshot is not None:
            self._archivist.begin(snapshot, self.found.top1 if tested and self.found is not None else None)

    def finish(self) -> None:
        """Tests and saves the final model."""
        self.evaluate(self.job.learning.epochs)
        if self.job.keeping.folder is not None:
            path = self.job.keeping.folder / "model.safetensors"
            self._presentation.save(path, self._leader.workers.in_order, self.job.keeping.claim)
        if self._archivist is not None and self.found is not None:
            self._archivist.tested(self.found.top1)

    def wait(self) -> None:
        """Waits until no checkpoint is under way."""
        if self._archivist is not None:
            self._archivist.wait()

    def _employed(self) -> Archivist | None:
        if self._archive is None or not self.job.keeping.checkpoints:
            return None
        return Archivist(
            self._archive, self._world.activity, self._emitter.say, beside=self._world.pace is None
        )


@dataclass(frozen=True)
class _InDtype:
    """A split whose pictures have the model's dtype, as they have in training."""

    split: Split
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.split)

    @property
    def labels(self) -> Tensor:
        return self.split.labels

    def images(self, indices: Tensor) -> Tensor:
        return self.split.images(indices).to(self.dtype)


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

    def evaluate(self, states: list[WorkerState], presented: Tensor | None = None) -> Evaluation:
        """Tests the model.

        Args:
            states: the workers', worker 0's first.
            presented: `(size,)`, the parameters to test, where they are not the replica's; averaged weights go before.
        """
        dataset = self._job.dataset
        with self._shown(states, presented):
            test = _InDtype(dataset.test, self._replica.flat.vector.dtype)
            return evaluate(self._replica.model, test, classes=dataset.classes, device=self._job.device)

    def save(self, path: Path, states: list[WorkerState], claim: Unclaimed = UNCLAIMED) -> None:
        """Writes the model's weights, and what is needed to use them."""
        dataset = self._job.dataset
        facts = {
            "model": self._job.model_name,
            "data": dataset.name,
            "classes": "\n".join(dataset.classes),
            "image_shape": ",".join(map(str, dataset.image_shape)),
            "shown": str(dataset.shown),
            "black": ",".join(map(str, dataset.black)),
            "white": ",".join(map(str, dataset.white)),
        }
        with self._shown(states):
            save_weights(self._replica.model, path, facts, claim)

    @contextmanager
    def _shown(self, states: list[WorkerState], presented: Tensor | None = None) -> Iterator[None]:
        vector, buffers = self._replica.flat.vector, self._replica.buffers
        trained = vector.clone()
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
            vector.copy_(trained)
            for name, value in own.items():
                buffers[name].copy_(value)

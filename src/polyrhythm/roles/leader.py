"""The leader: the worker that evaluates, saves and speaks for the run. It learns like any other."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from polyrhythm.errors import PeerLost, RunError
from polyrhythm.events import (
    CacheUsed,
    Evaluated,
    Event,
    Notice,
    RunEnded,
    RunStarted,
    WorkerProgress,
    WorkerTimings,
)
from polyrhythm.roles.archive import Archive
from polyrhythm.roles.archivist import Archivist
from polyrhythm.roles.correspondence import Correspondence
from polyrhythm.roles.job import Job
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.presentation import Presentation
from polyrhythm.roles.recording import ARRIVALS_FILE
from polyrhythm.roles.regroup import Regroup, Side
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.run_figures import RunFigures, Spent
from polyrhythm.roles.snapshot import Snapshot
from polyrhythm.roles.taking_over import (
    inherit_average,
    inherit_untrained,
    stock_of,
    tested_before,
    unfinished,
)
from polyrhythm.roles.welcome import Welcome
from polyrhythm.roles.worker_state import WorkerState
from polyrhythm.roles.world import LEADER, World


class Leader:
    """The leader's desk; see `Desk`.

    Args:
        job: what is learned.
        world: where this rank is.
        replica: this worker's.

    Attributes:
        job: what is learned; once a checkpoint has been read, with what others did of it.
    """

    def __init__(self, job: Job, world: World, replica: Replica) -> None:
        self.job = job if world.ledger is None else job.going_on(world.ledger.begun)
        self._world = world
        self._replica = replica
        self._in_step = job.strategy.in_step(job.workers)
        self._goes_on = job.strategy.goes_on(job.workers)
        self._regroups = job.strategy.regroups(job.workers)
        self._ledger = world.ledger or Ledger.of(job.workers)
        self._others = Correspondence(world, job.strategy, self._say, self._welcome, self._ledger)
        self._figures = RunFigures(self.job, world, replica, self._others)
        self._presentation = Presentation(job, replica)
        self._archive = Archive(job) if job.keeping.folder is not None else None
        self._archivist = self._employed()
        self._found = tested_before(self._ledger)
        self._too_few = False
        self._started_at = world.clock.now()
        self._earlier_s = self._ledger.earlier_s
        self._paused_s = self._ledger.paused_s

    @property
    def side(self) -> Side:
        """It makes the formations."""
        return self._others.assembly

    def wait_with(self, regroup: Regroup) -> None:
        """Lets workers regroup while this one waits for their states."""
        self._others.mend = regroup.mend

    def bears(self, loss: PeerLost) -> bool:
        """Never: this is the leader."""
        return False

    def restore(self) -> WorkerState | None:
        """Reads the newest checkpoint, hands every rank its part, and gives this worker's."""
        if not self.job.keeping.resume:
            return None
        assert self._archive is not None, "a resumed run has a folder"
        snapshot = self._archive.load()
        self.job = self._figures.job = self.job.going_on(snapshot.begun)
        self._replica.flat.vector.copy_(snapshot.parameters)
        if self._presentation.average is not None and snapshot.average:
            self._presentation.average.load_state_dict(snapshot.average)
        replicated = self._replica.part.replicated
        others = {worker: snapshot.worker(worker, replicated) for worker in range(1, self.job.workers)}
        servers = self.job.strategy.recut(snapshot.servers, self._replica.plan)
        self._others.hand_out(others, servers, snapshot.behind(self.job.workers))
        self._earlier_s = snapshot.seconds
        return snapshot.worker(0, replicated)

    def rejoin(self) -> float:
        """Takes up the lead of a run whose leader was lost; gives the seconds since training started."""
        assert self._ledger.began_at_s is not None, "a leader has a successor when training has started"
        self._started_at = self._ledger.began_at_s
        self._others.take_over()
        inherit_untrained(self._others, self._replica)
        if self._has_stock:
            self._others.await_introductions()
            self._finish_with_stock()
        return self._world.clock.now() - self._started_at

    def begin(self, epoch: int) -> None:
        """Says that training starts, unless that has been said."""
        if self._ledger.began:
            return
        job, cast = self.job, self._world.cast
        if job.keeping.folder is not None:  # of what this run goes on from
            (job.keeping.folder / ARRIVALS_FILE).unlink(missing_ok=True)
        self._started_at = self._world.clock.now()
        self._emit(
            RunStarted(
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
                earlier_s=self._earlier_s,
                parameters=self._replica.flat.size,
                begun=job.begun.to_json(),
            )
        )
        for remark in (
            job.strategy.remark(job.workers),
            *([] if self._archive is None else self._archive.remarks),
        ):
            if remark:
                self._emit(Notice(time_s=0, text=remark))

    def entered(self, state: WorkerState) -> None:
        """Tests and saves what the lost leader did not come to, with the parameters of now."""
        if not self._world.rejoins:
            return
        self._others.states[LEADER] = state
        if self._presentation.average is not None:
            inherit_average(self._presentation.average, self._archive, self._replica)
        if self._has_stock:
            self._finish_with_stock()
        missing = unfinished(self._ledger, self.job, state.account.step, saves=self._archivist is not None)
        if not (missing.test or missing.save):
            return
        presented = None if self._regroups else self._replica.part.present()
        if missing.is_last or (self._regroups and missing.at_its_end):
            self._others.wait_for_step(state.account.step)
        if missing.test:
            if not (missing.at_its_end and self.job.strategy.agrees(self.job.workers)):
                self._emit(Notice(time_s=0, text=missing.text))
            self._evaluate(missing.epochs, presented)
        if missing.save and (
            missing.at_its_end or not self._regroups
        ):  # else they have states of several steps
            top1 = self._found.top1 if missing.test and self._found is not None else None
            self._save(self._snapshot(missing.epochs, state.account.step, presented), top1)
        if not self._regroups:  # who go in step wait meanwhile
            self._replica.part.catch_up()

    @property
    def _has_stock(self) -> bool:
        """Whether the others have handed in models of their own."""
        agree = self.job.strategy.agrees(self.job.workers)
        return self._regroups and not agree and self._presentation.average is None

    def _finish_with_stock(self) -> None:
        """Tests and saves what the others held when an epoch was over, if that is left undone: they have gone on."""
        reached = [state.account.step for worker, state in self._others.states.items() if worker != LEADER]
        step = max(reached, default=0)
        missing = unfinished(self._ledger, self.job, step, saves=self._archivist is not None)
        stock = stock_of(self._others.states, self._replica.part, step)
        if stock is None or missing.is_last or not missing.at_its_end:
            return
        mean = stock.mean.to(self._replica.flat.vector.device)
        if missing.test:
            self._evaluate(missing.epochs, mean)
            self._ledger.tested_epochs = missing.epochs
        if missing.save and (snapshot := self._snapshot(missing.epochs, step, mean)) is not None:
            top1 = self._found.top1 if missing.test and self._found is not None else None
            self._save(replace(snapshot, parameters=stock.models[0], workers=stock.states), top1)
            self._ledger.saved_epochs = missing.epochs

    def step_done(self) -> None:
        """Keeps the weight average, for which the step must be over, and lets successors in."""
        if self._archivist is not None:
            self._archivist.look()
        if self._presentation.average is not None:
            self._replica.settle()
            self._presentation.average.update(self._replica.flat.vector)
        if self._goes_on:  # a successor waits for an answer
            self._others.read()

    def progress(self, event: WorkerProgress | WorkerTimings | CacheUsed) -> None:
        """Passes on what this worker and others have done lately."""
        self._world.emit(event)
        if isinstance(event, WorkerProgress) and (
            news := self._others.stragglers.hear(event, self._paused_s)
        ):
            self._world.emit(news)
        self._others.read()

    def epoch_done(self, epoch: int, state: WorkerState, presented: Tensor | None) -> None:
        """Evaluates and saves, with the other workers' states: all where they go in step, else the latest.

        What the lost leader did is not done again, though its successor may have had to take steps again before it.
        """
        last = epoch + 1 == self.job.learning.epochs
        self._others.states[LEADER] = state
        self._others.read()
        if last:  # hears the slower ones while they train, and not only once the servers let go
            self._others.wait_for_step(state.account.step)
        paused_at = self._world.clock.now()
        if self._in_step:
            self._others.wait_for_step(state.account.step)
        if not last and epoch >= self._ledger.tested_epochs:  # the final model is tested when all have left
            self._evaluate(epoch + 1, presented)
        top1 = None if last or self._found is None else self._found.top1
        if epoch >= self._ledger.saved_epochs:
            self._save(self._snapshot(epoch + 1, state.account.step, presented), top1)
        self._paused_s += self._world.clock.now() - paused_at

    def interrupted(self, state: WorkerState) -> None:
        """Saves, once every worker has stopped where it will stop."""
        self._others.states[LEADER] = state
        if self._in_step:
            self._others.wait_for_step(state.account.step)
        else:
            self._others.wait_for_stop()
        self._save(self._snapshot(self.job.calendar.epoch_of(state.account.step), state.account.step))
        if self._archivist is not None:
            self._archivist.wait()

    def end(self, state: WorkerState) -> None:
        """Waits for everyone's last words, tests and saves the model, and says that the run is over."""
        self._others.states[LEADER] = state
        self._others.wait_for_workers()
        self._replica.part.let_go()
        self._others.wait_for_servers()
        stopped = self._figures.stopped
        trained_s = self._world.clock.now() - self._started_at - self._paused_s
        if not stopped:
            self._evaluate(self.job.learning.epochs)
            if self.job.keeping.folder is not None:
                self._presentation.save(self.job.keeping.folder / "model.safetensors", self._figures.states)
            if self._archivist is not None and self._found is not None:
                self._archivist.tested(self._found.top1)
        if self._archivist is not None:
            self._archivist.wait()
        if stopped and self._too_few:
            raise self._ended_by_losses()
        outcome = "interrupted" if stopped else "done"
        self._figures.keep_arrivals(outcome)
        self._others.let_leave()
        seconds = self._world.clock.now() - self._started_at + self._earlier_s
        figures = self._figures.result(Spent(seconds, trained_s), self._found)
        self._emit(RunEnded(time_s=0, outcome=outcome, result=figures))

    def _welcome(self) -> Welcome:
        time_s = self._world.clock.now() - self._started_at
        return Welcome(self._replica.untrained, time_s, self.job.begun)

    def _say(self, event: Event) -> None:
        """Says that a worker is lost, or that a successor has come; stops the run where too few are left."""
        self._emit(event)
        attendance, losses = self._others.attendance, self.job.losses
        if len(attendance.present) < losses.min_workers and attendance.lost > losses.restarts:
            self._too_few = True
            self._world.stop.wish()

    def _ended_by_losses(self) -> RunError:
        folder = f" {self.job.keeping.folder}" if self.job.keeping.folder is not None else ""
        return RunError(
            f"{len(self._others.attendance.present)} of {self.job.workers} workers are left, and min_workers is "
            f"{self.job.losses.min_workers}; continue with --resume{folder}"
        )

    def _evaluate(self, epoch: int, presented: Tensor | None = None) -> None:
        with self._world.activity.doing("testing the model", takes_long=True):
            found = self._presentation.evaluate(self._figures.states, presented)
        self._found = found
        self._emit(
            Evaluated(time_s=0, epoch=epoch, test_loss=found.loss, test_top1=found.top1, test_top5=found.top5)
        )

    def _employed(self) -> Archivist | None:
        if self._archive is None or not self.job.keeping.checkpoints:
            return None
        return Archivist(self._archive, self._world.activity, self._emit, beside=self._world.pace.live)

    def _save(self, snapshot: Snapshot | None, top1: float | None = None) -> None:
        """Has the run's state written."""
        if self._archivist is not None and snapshot is not None:
            self._archivist.begin(snapshot, top1)

    def _snapshot(self, epoch: int, step: int, presented: Tensor | None = None) -> Snapshot | None:
        """Copies the run's state, if it is kept; what workers and servers hand in is a copy already."""
        if self._archivist is None:
            return None
        self._archivist.wait()  # before there is one more copy
        average = {} if self._presentation.average is None else self._presentation.average.state_dict()
        return Snapshot(
            epoch=epoch,
            step=step,
            seconds=self._world.clock.now() - self._started_at + self._earlier_s,
            parameters=self._replica.flat.vector.detach().to("cpu", copy=True),
            workers=dict(self._others.states),
            servers=self._others.ask_servers(),
            average={name: value.detach().to("cpu", copy=True) for name, value in average.items()},
            presented=None if average or presented is None else presented.detach().to("cpu", copy=True),
            begun=self.job.begun,
        )

    def _emit(self, event: Event) -> None:
        """Stamps and emits an event of the leader's own."""
        self._world.emit(replace(event, time_s=self._world.clock.now() - self._started_at))

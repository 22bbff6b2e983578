"""The leader: the worker that evaluates, saves and speaks for the run. It learns like any other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from polyrhythm.communication.arrivals import Arrivals
from polyrhythm.errors import RunError
from polyrhythm.evaluation.evaluate import Evaluation
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
from polyrhythm.roles import result
from polyrhythm.roles.archive import Archive
from polyrhythm.roles.archivist import Archivist
from polyrhythm.roles.correspondence import Correspondence
from polyrhythm.roles.job import Job
from polyrhythm.roles.presentation import Presentation
from polyrhythm.roles.recording import ARRIVALS_FILE, recording_of
from polyrhythm.roles.regroup import Regroup, Side
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.snapshot import Snapshot
from polyrhythm.roles.welcome import Welcome
from polyrhythm.roles.worker_state import WorkerState
from polyrhythm.roles.world import World


class Leader:
    """The leader's desk; see `Desk`.

    Args:
        job: what is learned.
        world: where this rank is.
        replica: this worker's.
    """

    def __init__(self, job: Job, world: World, replica: Replica) -> None:
        self._job = job
        self._world = world
        self._replica = replica
        self._in_step = job.strategy.in_step(job.workers)
        self._goes_on = job.strategy.goes_on(job.workers)
        self._others = Correspondence(world, job.strategy, self._say, self._welcome)
        self._presentation = Presentation(job, replica)
        self._archive = Archive(job) if job.keeping.folder is not None else None
        self._archivist = self._employed()
        self._found: Evaluation | None = None
        self._too_few = False
        self._started_at = world.clock.now()
        self._earlier_s = 0.0
        self._paused_s = 0.0

    @property
    def side(self) -> Side:
        """It makes the formations."""
        return self._others

    def wait_with(self, regroup: Regroup) -> None:
        """Lets workers regroup while this one waits for their states."""
        self._others.mend = regroup.mend

    def restore(self) -> WorkerState | None:
        """Reads the newest checkpoint, hands every rank its part, and gives this worker's."""
        if not self._job.keeping.resume:
            return None
        assert self._archive is not None, "a resumed run has a folder"
        snapshot = self._archive.load()
        self._replica.flat.vector.copy_(snapshot.parameters)
        if self._presentation.average is not None and snapshot.average:
            self._presentation.average.load_state_dict(snapshot.average)
        replicated = self._replica.part.replicated
        others = {worker: snapshot.worker(worker, replicated) for worker in range(1, self._job.workers)}
        self._others.hand_out(others, self._job.strategy.recut(snapshot.servers, self._replica.plan))
        self._earlier_s = snapshot.seconds
        return snapshot.worker(0, replicated)

    def begin(self, epoch: int) -> None:
        """Says that training starts."""
        job, cast = self._job, self._world.cast
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
                parameters=self._replica.flat.size,
            )
        )
        for remark in (
            job.strategy.remark(job.workers),
            *([] if self._archive is None else self._archive.remarks),
        ):
            if remark:
                self._emit(Notice(time_s=0, text=remark))

    def entered(self, state: WorkerState) -> None:
        """Never: the leader has no successor."""

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
        """Evaluates and saves, with the other workers' states: all where they go in step, else the latest."""
        last = epoch + 1 == self._job.learning.epochs
        self._others.states[0] = state
        self._others.read()
        if last:  # hears the slower ones while they train, and not only once the servers let go
            self._others.wait_for_step(state.account.step)
        paused_at = self._world.clock.now()
        if self._in_step:
            self._others.wait_for_step(state.account.step)
        if not last:  # the final model is tested when all have left
            self._evaluate(epoch + 1, presented)
        top1 = None if last or self._found is None else self._found.top1
        self._save(epoch + 1, state.account.step, top1, presented)
        self._paused_s += self._world.clock.now() - paused_at

    def interrupted(self, state: WorkerState) -> None:
        """Saves, once every worker has stopped where it will stop."""
        self._others.states[0] = state
        if self._in_step:
            self._others.wait_for_step(state.account.step)
        else:
            self._others.wait_for_stop()
        self._save(self._job.calendar.epoch_of(state.account.step), state.account.step)
        if self._archivist is not None:
            self._archivist.wait()

    def end(self, state: WorkerState) -> None:
        """Waits for everyone's last words, tests and saves the model, and says that the run is over."""
        self._others.states[0] = state
        self._others.wait_for_workers()
        self._replica.part.let_go()
        self._others.wait_for_servers()
        stopped = any(entry.account.stopped for entry in self._states())
        trained_s = self._world.clock.now() - self._started_at - self._paused_s
        if not stopped:
            self._evaluate(self._job.learning.epochs)
            if self._job.keeping.folder is not None:
                self._presentation.save(self._job.keeping.folder / "model.safetensors", self._states())
            if self._archivist is not None and self._found is not None:
                self._archivist.tested(self._found.top1)
        if self._archivist is not None:
            self._archivist.wait()
        if stopped and self._too_few:
            raise self._ended_by_losses()
        outcome = "interrupted" if stopped else "done"
        self._keep_arrivals(outcome)
        self._emit(RunEnded(time_s=0, outcome=outcome, result=self._result(trained_s)))

    def _welcome(self) -> Welcome:
        return Welcome(self._replica.untrained, self._world.clock.now() - self._started_at)

    def _say(self, event: Event) -> None:
        """Says that a worker is lost, or that a successor has come; stops the run where too few are left."""
        self._emit(event)
        attendance, losses = self._others.attendance, self._job.losses
        if len(attendance.present) < losses.min_workers and attendance.lost > losses.restarts:
            self._too_few = True
            self._world.stop.wish()

    def _ended_by_losses(self) -> RunError:
        folder = f" {self._job.keeping.folder}" if self._job.keeping.folder is not None else ""
        return RunError(
            f"{len(self._others.attendance.present)} of {self._job.workers} workers are left, and min_workers is "
            f"{self._job.losses.min_workers}; continue with --resume{folder}"
        )

    def _keep_arrivals(self, outcome: str) -> None:
        """Writes down whom every rank has heard, so that the run can be replayed."""
        folder = self._job.keeping.folder
        if folder is None or self._world.arrivals is None:
            return
        cast = self._world.cast
        told = {cast.workers[state.account.worker]: state.account.arrivals for state in self._states()}
        told |= {rank: report["arrivals"] for rank, report in self._others.reports.items()}
        told[self._world.network.rank] = (
            self._world.arrivals.to_json()
        )  # with what it heard while others left
        ranks = {rank: Arrivals.from_json(entry) for rank, entry in told.items() if entry}
        digest = result.digest(self._replica.flat.vector)
        lost = self._others.attendance.lost
        recording_of(
            self._job, cast, ranks, outcome=outcome, parameters_sha256=digest, workers_lost=lost
        ).write(folder)

    def _states(self) -> list[WorkerState]:
        states = self._others.states
        return [states[worker] for worker in sorted(states)]

    def _evaluate(self, epoch: int, presented: Tensor | None = None) -> None:
        with self._world.activity.doing("testing the model", takes_long=True):
            found = self._presentation.evaluate(self._states(), presented)
        self._found = found
        self._emit(
            Evaluated(time_s=0, epoch=epoch, test_loss=found.loss, test_top1=found.top1, test_top5=found.top5)
        )

    def _employed(self) -> Archivist | None:
        if self._archive is None or not self._job.keeping.checkpoints:
            return None
        return Archivist(self._archive, self._world.activity, self._emit, beside=self._world.pace.live)

    def _save(
        self, epoch: int, step: int, top1: float | None = None, presented: Tensor | None = None
    ) -> None:
        """Copies the run's state and has it written; what workers and servers hand in is a copy already."""
        if self._archivist is None:
            return
        self._archivist.wait()  # before there is one more copy
        average = {} if self._presentation.average is None else self._presentation.average.state_dict()
        snapshot = Snapshot(
            epoch=epoch,
            step=step,
            seconds=self._world.clock.now() - self._started_at + self._earlier_s,
            parameters=self._replica.flat.vector.detach().to("cpu", copy=True),
            workers=dict(self._others.states),
            servers=self._others.ask_servers(),
            average={name: value.detach().to("cpu", copy=True) for name, value in average.items()},
            presented=None if average or presented is None else presented.detach().to("cpu", copy=True),
        )
        self._archivist.begin(snapshot, top1)

    def _emit(self, event: Event) -> None:
        """Stamps and emits an event of the leader's own."""
        self._world.emit(replace(event, time_s=self._world.clock.now() - self._started_at))

    def _result(self, trained_s: float) -> dict[str, Any]:
        job = self._job
        accounts = [state.account for state in self._states()]
        reports = list(self._others.reports.values())
        attendance = self._others.attendance
        images = sum(account.session_images for account in accounts) + attendance.images_of_lost
        stopped = any(account.stopped for account in accounts)
        return {
            "run": str(job.keeping.folder) if job.keeping.folder is not None else None,
            "strategy": str(job.strategy),
            "data": job.dataset.name,
            "model": job.model_name,
            "workers": job.workers,
            "servers": len(self._world.cast.servers),
            "steps": accounts[0].step,
            "epochs": job.calendar.epochs_done(accounts[0].step),
            "seconds": self._world.clock.now() - self._started_at + self._earlier_s,
            "images_per_s": images / trained_s if trained_s > 0 else 0.0,
            "train_loss": result.train_loss(accounts),
            **(result.test_figures(self._found) if self._found is not None else {}),
            "workers_lost": attendance.lost,
            "workers_joined": attendance.joined,
            "servers_lost": len(self._others.servers_lost),
            "images_not_seen": 0 if stopped else self._images_not_seen(),
            "bytes_sent_per_step": result.bytes_per_step(accounts, reports, attendance.steps_of_lost),
            "staleness": result.staleness_figures(accounts, reports),
            **result.defence_figures(reports),
            "parameters_sha256": result.digest(self._replica.flat.vector),
        }

    def _images_not_seen(self) -> int:
        if self._job.strategy.regroups(self._job.workers):
            part = self._replica.part
            lost = 0
            if (
                not part.replicated
            ):  # workers that hold the same take a step that broke again, with all its images
                lost = result.images_of_broken_rounds(self._job, self._others.missed, part.exchanges)
            return lost + result.images_left_out(self._job, self._others.history)
        reports = list(self._others.reports.values())
        not_applied = result.images_not_applied(self._job, self._world.cast, reports)
        return result.images_not_seen(self._job, self._steps_done()) + not_applied

    def _steps_done(self) -> dict[int, int]:
        """Gives the steps that count of every worker: as it says itself, or as the servers know of a lost one."""
        done = {state.account.worker: state.account.step for state in self._states()}
        for worker, rank in enumerate(self._world.cast.workers):
            held = [report["steps"].get(str(rank), 0) for report in self._others.reports.values()]
            done.setdefault(worker, min(held, default=self._others.attendance.last_step(worker)))
        return done

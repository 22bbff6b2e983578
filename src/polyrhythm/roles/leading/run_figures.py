"""The leader's accounts of a run that is over: its figures, and its recording."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polyrhythm.communication.arrivals import Arrivals
from polyrhythm.evaluation.evaluate import Evaluation
from polyrhythm.events import RunStarted
from polyrhythm.roles import result
from polyrhythm.roles.job import Job
from polyrhythm.roles.keeping.recording import recording_of
from polyrhythm.roles.keeping.worker_state import WorkerState
from polyrhythm.roles.leading.correspondence import Correspondence
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.world import World


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
        others: what it has been told.

    Attributes:
        job: what is learned, with what others did of it.
    """

    def __init__(self, job: Job, world: World, replica: Replica, others: Correspondence) -> None:
        self.job = job
        self._world = world
        self._replica = replica
        self._others = others

    @property
    def states(self) -> list[WorkerState]:
        """The latest of every worker that is there, in the workers' order."""
        return self._others.workers.in_order

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
            free_running=not job.strategy.waits_for_slower(len(cast.workers)),
            begun=job.begun.to_json(),
        )

    def keep_arrivals(self, outcome: str) -> None:
        """Writes down whom every rank has heard, so that the run can be replayed."""
        folder = self.job.keeping.folder
        if folder is None or self._world.arrivals is None:
            return
        cast = self._world.cast
        told = {cast.workers[state.account.worker]: state.account.arrivals for state in self.states}
        told |= {rank: report["arrivals"] for rank, report in self._others.servers.reports.items()}
        # With what this one heard while others left.
        told[self._world.network.rank] = self._world.arrivals.to_json()
        ranks = {rank: Arrivals.from_json(entry) for rank, entry in told.items() if entry}
        digest = result.digest(self._replica.flat.vector)
        lost = self._others.attendance.lost
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
        reports = list(self._others.servers.reports.values())
        attendance = self._others.attendance
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
            "servers_lost": self._others.servers.attendance.losses.lost,
            "servers_joined": self._others.servers.attendance.losses.joined,
            "images_not_seen": 0 if self.stopped else job.begun.left_out + self._images_not_seen(),
            "bytes_sent_per_step": result.bytes_per_step(accounts, reports, attendance.steps_of_lost),
            "staleness": result.staleness_figures(accounts, reports),
            **result.defence_figures(reports),
            "parameters_sha256": result.digest(self._replica.flat.vector),
        }

    def _images_not_seen(self) -> int:
        if self.job.strategy.regroups(self.job.workers):
            part, formation = self._replica.part, self._others.assembly.muster.formation
            lost = 0
            if not part.replicated:
                # Workers that hold the same take a step that broke again, with all its images.
                lost = result.images_of_broken_rounds(self.job, formation.missed, part.exchanges)
            return lost + result.images_left_out(self.job, formation.absences)
        reports = list(self._others.servers.reports.values())
        not_applied = result.images_not_applied(self.job, self._world.cast, reports)
        not_there = result.images_of_absent(self.job, self._world.cast, reports)
        return result.images_not_seen(self.job, self._steps_done()) + not_applied + not_there

    def _steps_done(self) -> dict[int, int]:
        """Gives the steps that count of every worker: as it says itself, or as the servers know of a lost one."""
        done = {state.account.worker: state.account.step for state in self.states}
        for worker, rank in enumerate(self._world.cast.workers):
            told = [report["steps"] for report in self._others.servers.reports.values()]
            held = [steps[str(rank)] for steps in told if str(rank) in steps]  # a site knows of its own only
            done.setdefault(worker, min(held, default=self._others.attendance.last_step(worker)))
        return done

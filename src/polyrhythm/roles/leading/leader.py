"""The leader: the worker that tests, saves and reports on behalf of the run. It trains like any other.

`RunFigures` makes the figures and the recording of a run that is over. `Inheritance` is what the lost leader
has left undone, and how its successor finishes it:

where all hold the same            the parameters of now are tested and saved
where each has a model of its own  what they handed in at the end of an epoch (`Stock`), before regrouping
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from polyrhythm.communication.arrivals import Arrivals
from polyrhythm.data.dealing import Begun
from polyrhythm.errors import PeerLost
from polyrhythm.evaluation.evaluate import Evaluation
from polyrhythm.events import CacheUsed, Event, Notice, RunEnded, RunStarted, WorkerProgress, WorkerTimings
from polyrhythm.roles import result
from polyrhythm.roles.job import Job
from polyrhythm.roles.keeping.recording import ARRIVALS_FILE, recording_of
from polyrhythm.roles.keeping.worker_state import WorkerState
from polyrhythm.roles.leading.checkpoint_collector import Curator, Narrator
from polyrhythm.roles.leading.control_plane import Correspondence
from polyrhythm.roles.leading.taking_over import Unfinished, inherit_untrained, stock_of, unfinished
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.regrouping.regroup import FormationSource, GroupRegroup, Regroup
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.welcome import Welcome
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.strategy import RecutsServers, Remarks


class Leader:
    """The coordinator of rank 0; see `Coordinator`.

    Args:
        job: what is learned.
        world: where this rank is.
        replica: this worker's.

    Attributes:
        job: what is learned; once a checkpoint has been read, with what others did of it.
    """

    def __init__(self, job: Job, world: World, replica: Replica) -> None:
        self.job = job
        self._world = world
        self._replica = replica
        self._in_step = job.traits.lockstep
        self._goes_on = job.faults.goes_on
        self._ledger = world.ledger or Ledger.of(job.workers)
        self._others = Correspondence(world, job.strategy, self._say, self._welcome, self._ledger)
        self._figures = RunFigures(job, world, replica, self._others)
        self._narrator = Narrator(world, self._ledger)
        self._curator = Curator(job, world, replica, self._others, self._narrator, self._ledger)
        self._too_few: int | None = None
        """How many workers were left when there were too few."""
        if world.ledger is not None:
            self._go_on(world.ledger.begun)

    @property
    def formations(self) -> FormationSource:
        """It makes the formations."""
        return self._others.assembly

    def wait_with(self, regroup: Regroup) -> None:
        """Sets what regroups while this worker waits for states."""
        self._others.reform = regroup.reform

    def wait_among(self, group: GroupRegroup) -> None:
        """Sets what regroups worker 0's group while it waits for states."""
        self._others.group = group

    def recovers_from(self, loss: PeerLost) -> bool:
        """Never: this is the leader."""
        return False

    def restore(self) -> WorkerState | None:
        """Reads the newest checkpoint, hands every rank its part, and gives this worker's."""
        if not self.job.keeping.resume:
            return None
        snapshot = self._curator.load()
        self._go_on(snapshot.begun)
        self._replica.flat.vector.copy_(snapshot.parameters)
        replicated = self._replica.part.replicated
        others = {worker: snapshot.worker(worker, replicated) for worker in range(1, self.job.workers)}
        servers, strategy = snapshot.servers, self.job.strategy
        if isinstance(strategy, RecutsServers):
            servers = strategy.recut(servers, self._replica.plan)
        self._others.hand_out(others, servers, snapshot.behind(self.job.workers))
        self._narrator.earlier_s = snapshot.seconds
        return snapshot.worker(0, replicated)

    def rejoin(self) -> float:
        """Takes up the lead of a run whose leader was lost; gives the seconds since training started."""
        assert self._ledger.began_at_s is not None, "a leader has a successor when training has started"
        self._narrator.take_up(self._ledger.began_at_s)
        self._inheritance.take_up()
        return self._narrator.elapsed_s

    def begin(self, epoch: int) -> None:
        """Says that training starts, unless that has been said."""
        if self._ledger.began:
            return
        folder = self.job.keeping.folder
        if folder is not None:  # of what this run goes on from
            self.job.keeping.claim.remove(folder / ARRIVALS_FILE)
        self._narrator.begin()
        self._narrator.say(self._figures.opening(epoch, self._narrator.earlier_s))
        strategy, of_data = self.job.strategy, self.job.dataset.remark
        of_strategy = strategy.remark(self.job.workers) if isinstance(strategy, Remarks) else ""
        for remark in (of_strategy, of_data, *self._curator.remarks):
            if remark:
                self._narrator.say(Notice(time_s=0, text=remark))

    def entered(self, state: WorkerState) -> None:
        """Tests and saves what the lost leader did not come to, with the parameters of now."""
        if self._world.rejoins:
            self._others.workers.states[LEADER] = state
            self._inheritance.finish(state.account.step)

    def step_done(self) -> None:
        """Keeps the weight average, for which the step must be over, and lets successors in."""
        self._curator.step_done()
        if self._goes_on:  # a successor waits for an answer
            self._others.read()

    def progress(self, event: WorkerProgress | WorkerTimings | CacheUsed) -> None:
        """Passes on what this worker and others have done lately."""
        self._world.emit(event)
        if isinstance(event, WorkerProgress) and (
            news := self._others.workers.stragglers.on_progress(event, self._narrator.paused_s)
        ):
            self._world.emit(news)
        self._others.read()

    def epoch_done(self, epoch: int, state: WorkerState, presented: Tensor | None) -> None:
        """Evaluates and saves, with the other workers' states: all where they go in step, else the latest.

        What the lost leader did is not done again, though its successor may have had to take steps again before it.
        """
        last = epoch + 1 == self.job.learning.epochs
        self._others.workers.states[LEADER] = state
        self._others.read()
        if last:  # hears the slower ones while they train, and not only once the servers let go
            self._others.wait_for_step(state.account.step)
        paused_at = self._world.clock.now()
        if self._in_step:
            self._others.wait_for_step(state.account.step)
        if not last and epoch >= self._ledger.tested_epochs:  # the final model is tested when all have left
            self._curator.evaluate(epoch + 1, presented)
        if epoch >= self._ledger.saved_epochs:
            self._curator.save(
                self._curator.snapshot(epoch + 1, state.account.step, presented), tested=not last
            )
        self._narrator.paused_s += self._world.clock.now() - paused_at

    def interrupted(self, state: WorkerState) -> None:
        """Saves, once every worker has stopped where it will stop."""
        self._others.workers.states[LEADER] = state
        if self._in_step:
            self._others.wait_for_step(state.account.step)
        else:
            self._others.wait_for_stop(self.job.calendar.total_steps)
        self._curator.save(
            self._curator.snapshot(self.job.calendar.epoch_of(state.account.step), state.account.step)
        )
        self._curator.wait()

    def end(self, state: WorkerState) -> None:
        """Waits for everyone's last words, tests and saves the model, and says that the run is over."""
        self._others.workers.states[LEADER] = state
        self._others.wait_for_workers()
        self._replica.part.let_go()
        self._others.servers.wait()
        stopped = self._figures.stopped
        trained_s = self._narrator.trained_s
        if not stopped:
            self._curator.finish()
        self._curator.wait()
        if stopped and self._too_few is not None:
            raise self.job.too_few(self._too_few)
        outcome = "interrupted" if stopped else "done"
        self._figures.keep_arrivals(outcome)
        self._others.let_leave()
        spent = Spent(self._narrator.total_s, trained_s)
        figures = self._figures.result(spent, self._curator.found)
        self._narrator.say(RunEnded(time_s=0, outcome=outcome, result=figures))

    @property
    def _inheritance(self) -> Inheritance:
        return Inheritance(self.job, self._replica, self._others, self._curator, self._narrator, self._ledger)

    def _go_on(self, begun: Begun) -> None:
        """Takes up what others did of epochs that are not over."""
        self.job = self._figures.job = self._curator.job = self.job.going_on(begun)

    def _welcome(self) -> Welcome:
        return Welcome(self._replica.untrained, self._narrator.elapsed_s, self.job.begun)

    def _say(self, event: Event) -> None:
        """Says that a worker is lost, or that a successor has come; stops the run where too few are left."""
        self._narrator.say(event)
        attendance, losses = self._others.attendance, self.job.losses
        left = len(attendance.present)
        if left < losses.min_workers and attendance.lost > losses.restarts:
            self._too_few = left if self._too_few is None else min(left, self._too_few)
            self._world.stop.request()


class Inheritance:
    """A new leader's.

    Args:
        job: what is learned, with what others did of it.
        replica: the leader's.
        others: who are under way.
        curator: tests and saves.
        narrator: says what is not as it would have been.
        ledger: of the run so far.
    """

    def __init__(
        self,
        job: Job,
        replica: Replica,
        others: Correspondence,
        curator: Curator,
        narrator: Narrator,
        ledger: Ledger,
    ) -> None:
        self._job = job
        self._replica = replica
        self._others = others
        self._curator = curator
        self._narrator = narrator
        self._ledger = ledger
        self._agree = job.traits.identical
        self._regroups = job.faults.regroups

    def take_up(self) -> None:
        """Says who leads from now on, and takes what the others hold."""
        self._others.take_over()
        inherit_untrained(self._others, self._replica)
        if self._has_stock:
            self._others.await_introductions()
            self._finish_with_stock()

    def finish(self, step: int) -> None:
        """Tests and saves what the lost leader did not come to, with the parameters of now.

        Args:
            step: steps that the leader has done, as far as they count.
        """
        self._curator.inherit()
        if self._has_stock:
            self._finish_with_stock()
        missing = self._missing(step)
        if not (missing.test or missing.save):
            return
        presented = None if self._regroups else self._replica.part.present()
        if missing.is_last or (self._regroups and missing.at_its_end):
            self._others.wait_for_step(step)
        if missing.test:
            if not (missing.at_its_end and self._agree):
                self._narrator.say(Notice(time_s=0, text=missing.text))
            self._curator.evaluate(missing.epochs, presented)
        if missing.save and (missing.at_its_end or not self._regroups):
            # Otherwise they have states of several steps.
            self._curator.save(self._curator.snapshot(missing.epochs, step, presented), tested=missing.test)
        if not self._regroups:  # who go in step wait meanwhile
            self._replica.part.catch_up()

    @property
    def _has_stock(self) -> bool:
        """Whether the others have handed in models of their own."""
        return self._regroups and not self._agree and not self._curator.averages

    def _finish_with_stock(self) -> None:
        """Tests and saves what the others held when an epoch was over, if that is left undone: they have gone on."""
        reached = [
            state.account.step for worker, state in self._others.workers.states.items() if worker != LEADER
        ]
        step = max(reached, default=0)
        missing = self._missing(step)
        stock = stock_of(self._others.workers.states, self._replica.part, step)
        if stock is None or missing.is_last or not missing.at_its_end:
            return
        mean = stock.mean.to(self._replica.flat.vector.device)
        if missing.test:
            self._curator.evaluate(missing.epochs, mean)
            self._ledger.tested_epochs = missing.epochs
        if missing.save and (snapshot := self._curator.snapshot(missing.epochs, step, mean)) is not None:
            kept = replace(snapshot, parameters=stock.models[0], workers=stock.states)
            self._curator.save(kept, tested=missing.test)
            self._ledger.saved_epochs = missing.epochs

    def _missing(self, step: int) -> Unfinished:
        return unfinished(self._ledger, self._job, step, saves=self._curator.saves)


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
        if self.job.faults.regroups:
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

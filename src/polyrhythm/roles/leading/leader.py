"""The leader: the worker that evaluates, saves and speaks for the run. It learns like any other."""

from __future__ import annotations

from torch import Tensor

from polyrhythm.data.dealing.begun import Begun
from polyrhythm.errors import PeerLost
from polyrhythm.events import CacheUsed, Event, Notice, RunEnded, WorkerProgress, WorkerTimings
from polyrhythm.roles.job import Job
from polyrhythm.roles.keeping.recording import ARRIVALS_FILE
from polyrhythm.roles.keeping.worker_state import WorkerState
from polyrhythm.roles.leading.correspondence import Correspondence
from polyrhythm.roles.leading.curator import Curator
from polyrhythm.roles.leading.inheritance import Inheritance
from polyrhythm.roles.leading.narrator import Narrator
from polyrhythm.roles.leading.run_figures import RunFigures, Spent
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.regrouping.group_regroup import GroupRegroup
from polyrhythm.roles.regrouping.regroup import FormationSource, Regroup
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.welcome import Welcome
from polyrhythm.roles.world import LEADER, World


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
        self._in_step = job.strategy.in_step(job.workers)
        self._goes_on = job.strategy.goes_on(job.workers)
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
        servers = self.job.strategy.recut(snapshot.servers, self._replica.plan)
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
        of_strategy, of_data = self.job.strategy.remark(self.job.workers), self.job.dataset.remark
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

"""The worker's loop."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Protocol

from torch import Tensor

from polyrhythm.errors import PeerLost
from polyrhythm.events import CacheUsed, WorkerProgress, WorkerTimings
from polyrhythm.roles.job import Job
from polyrhythm.roles.keeping.worker_state import Account, WorkerState
from polyrhythm.roles.leading.leader import Leader
from polyrhythm.roles.learner import Learner
from polyrhythm.roles.regrouping.regroup import FormationSource, GroupRegroup, Member, Regroup
from polyrhythm.roles.regrouping.worker_group import WorkerGroup
from polyrhythm.roles.remote_leader import RemoteLeader
from polyrhythm.roles.step_metrics import Tally, finish_work
from polyrhythm.roles.welcome import share_untrained
from polyrhythm.roles.world import World


class Coordinator(Protocol):
    """What a worker asks of the leader and reports to it.

    Rank 0 has the leader itself (`Leader`), every other worker a stand-in that talks to it (`RemoteLeader`).
    """

    @property
    def job(self) -> Job:
        """The job; after `restore` or `rejoin` it includes which part of the data earlier workers have used."""

    @property
    def formations(self) -> FormationSource:
        """How this worker gets the next formation."""

    def wait_with(self, regroup: Regroup) -> None:
        """Sets what regroups all workers while this one waits here for others."""

    def wait_among(self, group: GroupRegroup) -> None:
        """Sets what regroups this worker's group while it waits here for others."""

    def recovers_from(self, loss: PeerLost) -> bool:
        """Waits for a new leader, if the lost rank led and the run survives that; gives whether it does."""

    def restore(self) -> WorkerState | None:
        """Gives the state to resume from; None if the run is not resumed."""

    def rejoin(self) -> float:
        """Joins a run under way as the successor of a lost worker; gives the seconds since training started."""

    def begin(self, epoch: int) -> None:
        """Called when all replicas are equal and training starts, in this epoch."""

    def entered(self, state: WorkerState) -> None:
        """Called after `begin` by a successor that leads or was let in, and where a checkpoint is of the run's end."""

    def step_done(self) -> None:
        """Called after every step."""

    def progress(self, event: WorkerProgress | WorkerTimings | CacheUsed) -> None:
        """Passes a report of the latest steps on."""

    def epoch_done(self, epoch: int, state: WorkerState, presented: Tensor | None) -> None:
        """Called after an epoch.

        Args:
            epoch: its number.
            state: of this worker.
            presented: `(size,)`, the model to be tested, where it is not this worker's own.
        """

    def interrupted(self, state: WorkerState) -> None:
        """Called when this worker stops early because a rank was asked to."""

    def end(self, state: WorkerState) -> None:
        """Called last, when this worker has left the others."""


def work(job: Job, world: World) -> None:
    """Trains until all epochs are done or a rank is asked to stop.

    Args:
        job: what to learn.
        world: where this rank is.
    """
    if job.timings:
        world = world.timed(partial(finish_work, job.device))
    learner = Learner(job, world)
    make = Leader if world.leads else RemoteLeader
    coordinator: Coordinator = make(job, world, learner.replica)
    start, elapsed_s = (
        (0, coordinator.rejoin()) if world.rejoins else _begin(job, world, learner, coordinator)
    )
    job = coordinator.job
    learner.go_on(job)
    replica = learner.replica
    member = Member(learner.worker, replica.part, replica.flat, learner.deal, learner.stand_in)
    group = WorkerGroup(world, job.strategy, replica.workers, member, coordinator)
    if group.apart is not None:
        coordinator.wait_among(group.apart)
    loop = _TrainingLoop(job, world, learner, coordinator, group)
    step, stopped = loop.run(group.start(start), elapsed_s)
    if stopped:
        group.stop()
        coordinator.interrupted(loop.state(step, stopped=True))
    group.end()
    coordinator.end(loop.state(step, stopped=stopped, final=True))
    replica.part.close()


def _begin(job: Job, world: World, learner: Learner, coordinator: Coordinator) -> tuple[int, float]:
    """Agrees with all ranks on where to begin; gives the step, and the seconds since training started."""
    if job.faults.goes_on:
        share_untrained(world, learner.replica)
    else:
        learner.replica.share_untrained()
    restored = coordinator.restore()
    if restored is None:
        return 0, 0.0
    restored.give_back(learner.replica)
    learner.loss_scale = restored.loss_scale
    return restored.account.step, 0.0


class _TrainingLoop:
    """Runs one worker through the epochs, step by step, and reports on the way."""

    def __init__(
        self, job: Job, world: World, learner: Learner, coordinator: Coordinator, group: WorkerGroup
    ) -> None:
        self._group = group
        self._takes_over = world.leads and world.rejoins
        self._job = job
        self._learner = learner
        self._coordinator = coordinator
        self._arrivals = world.arrivals
        self._activity = world.activity
        self._timer = world.timer
        self._tally = Tally(learner.worker, world.clock)

    def run(self, start: int, elapsed_s: float) -> tuple[int, bool]:
        """Trains from a step on; gives the number of steps done and whether it was stopped early.

        Args:
            start: the step.
            elapsed_s: for how long the others have been training.
        """
        calendar = self._job.calendar
        if self._group.over and not self._takes_over:  # it was let in when the others had stopped
            return start, start < calendar.total_steps
        first = calendar.epoch_of(start)
        self._coordinator.begin(first)
        through = first == self._job.learning.epochs  # when the others were saved
        if self._group.let_in or self._takes_over or through:
            self._coordinator.entered(self.state(start))
        if self._group.stops:
            return start, start < calendar.total_steps
        self._tally.begin(elapsed_s)
        self._timer.start(elapsed_s)
        part = self._learner.replica.part
        done = start
        for epoch in range(first, self._job.learning.epochs):
            done, stopped = self._epoch(epoch, max(done, calendar.start(epoch)))
            if stopped:
                return done, True
            last = epoch + 1 == self._job.learning.epochs
            presented = None if last else self._group.run_or_regroup(part.present)
            self._coordinator.epoch_done(epoch, self.state(done), presented)
            if not last:
                self._group.run_or_regroup(part.catch_up)
                self._group.run_or_regroup(partial(self._group.check, done))
        return max(done, calendar.total_steps), False

    def state(self, step: int, *, stopped: bool = False, final: bool = False) -> WorkerState:
        """Takes this worker's state."""
        replica, tally = self._learner.replica, self._tally
        account = Account(
            worker=self._learner.worker,
            step=step,
            session_steps=tally.steps,
            session_images=tally.images,
            epoch_images=tally.epoch_images,
            epoch_loss=tally.epoch_loss,
            bytes_sent=replica.bytes_sent,
            staleness={str(key): count for key, count in replica.part.staleness.items()},
            stopped=stopped,
            final=final,
            arrivals=self._arrivals.to_json() if final and self._arrivals else {},
        )
        keeping = self._job.keeping
        saved = keeping.folder is not None and keeping.checkpoints > 0
        return WorkerState.of(replica, account, self._learner.loss_scale, to_resume=saved)

    def _epoch(self, epoch: int, step: int) -> tuple[int, bool]:
        self._tally.begin_epoch()
        last = self._job.calendar.start(epoch + 1)
        stopped = False
        while step < last and not stopped:
            taken = self._group.run_or_regroup(partial(self._stretch, epoch, step, last))
            step, stopped = taken or (self._group.step, self._group.stops)
        return step, stopped and (step < last or epoch + 1 < self._job.learning.epochs)

    def _stretch(self, epoch: int, step: int, last: int) -> tuple[int, bool]:
        """Takes steps until the epoch is over, the part leaves steps out, or a rank was asked to stop."""
        self._timer.begin()
        for batch in self._learner.epoch(epoch, step - self._job.calendar.start(epoch)):
            self._timer.lap("data")
            outcome = self._learner.step(batch, step)
            step, expected = self._learner.replica.part.next_step(step), step + 1
            self._tally.add(outcome.images, outcome.loss, outcome.wait_s)
            self._group.step = step
            self._activity.step_done(step)
            self._coordinator.step_done()
            if step >= last or outcome.stop:
                self._learner.replica.settle()
            self._timer.end_step(step)
            if self._tally.due or step >= last or outcome.stop:
                self._report(epoch, step, outcome.learning_rate)
            if outcome.stop or step != expected:
                break
            if step < last:  # else before the next epoch
                self._group.check(step)
            self._timer.begin()
        return step, outcome.stop

    def _report(self, epoch: int, step: int, learning_rate: float) -> None:
        progress = self._tally.say(epoch, step, learning_rate)
        self._coordinator.progress(progress)
        if cached := self._learner.cache_use():
            self._coordinator.progress(
                CacheUsed(time_s=progress.time_s, worker=progress.worker, **asdict(cached))
            )
        if timings := self._timer.say(progress, in_step=self._job.traits.lockstep):
            self._coordinator.progress(timings)

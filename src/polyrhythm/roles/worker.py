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
from polyrhythm.roles.mail import Mail
from polyrhythm.roles.regrouping.company import Company
from polyrhythm.roles.regrouping.group_regroup import GroupRegroup
from polyrhythm.roles.regrouping.regroup import Member, Regroup, Side
from polyrhythm.roles.step_timer import finish_work
from polyrhythm.roles.tally import Tally
from polyrhythm.roles.welcome import share_untrained
from polyrhythm.roles.world import World


class Desk(Protocol):
    """Where a worker reports: at the leader's own desk, or by message."""

    @property
    def job(self) -> Job:
        """What is learned; once this worker has been restored or let in, with what others did of it."""

    @property
    def side(self) -> Side:
        """How this worker comes to the next formation."""

    def wait_with(self, regroup: Regroup) -> None:
        """Lets workers regroup while this one waits for others here."""

    def wait_among(self, group: GroupRegroup) -> None:
        """Lets this worker's group regroup while it waits for others here."""

    def bears(self, loss: PeerLost) -> bool:
        """Waits until another leads, if it is the leader that is lost, and that is borne; gives whether it is."""

    def restore(self) -> WorkerState | None:
        """Gives the state to resume from, if the run is resumed."""

    def rejoin(self) -> float:
        """Comes in as a successor among the others, who are under way; gives the seconds since training started."""

    def begin(self, epoch: int) -> None:
        """All replicas are equal and training starts, in this epoch."""

    def entered(self, state: WorkerState) -> None:
        """This worker, a successor, leads, or has been let in among those who go in step; or was through when saved."""

    def step_done(self) -> None:
        """A step has been done."""

    def progress(self, event: WorkerProgress | WorkerTimings | CacheUsed) -> None:
        """Takes what the worker has done lately."""

    def epoch_done(self, epoch: int, state: WorkerState, presented: Tensor | None) -> None:
        """An epoch is over; what is presented is the model to be tested, where it is not this worker's own."""

    def interrupted(self, state: WorkerState) -> None:
        """This worker stops because someone was asked to."""

    def end(self, state: WorkerState) -> None:
        """This worker has left."""


def work(job: Job, world: World) -> None:
    """Trains until all epochs are done or someone wants to stop.

    Args:
        job: what to learn.
        world: where this rank is.
    """
    if job.timings:
        world = world.timed(partial(finish_work, job.device))
    learner = Learner(job, world)
    make = Leader if world.leads else Mail
    desk: Desk = make(job, world, learner.replica)
    start, elapsed_s = (0, desk.rejoin()) if world.rejoins else _begin(job, world, learner, desk)
    job = desk.job
    learner.go_on(job)
    replica = learner.replica
    member = Member(learner.worker, replica.part, replica.flat, learner.deal, learner.stand_in)
    company = Company(world, job.strategy, replica.workers, member, desk)
    if company.apart is not None:
        desk.wait_among(company.apart)
    shift = _Shift(job, world, learner, desk, company)
    step, stopped = shift.run(company.start(start), elapsed_s)
    if stopped:
        company.stop()
        desk.interrupted(shift.state(step, stopped=True))
    company.end()
    desk.end(shift.state(step, stopped=stopped, final=True))
    replica.part.close()


def _begin(job: Job, world: World, learner: Learner, desk: Desk) -> tuple[int, float]:
    """Gets ready together with all others; gives the step to begin with, and the seconds since training started."""
    if job.strategy.goes_on(job.workers):
        share_untrained(world, learner.replica)
    else:
        learner.replica.share_untrained()
    restored = desk.restore()
    if restored is None:
        return 0, 0.0
    restored.give_back(learner.replica)
    learner.loss_scale = restored.loss_scale
    return restored.account.step, 0.0


class _Shift:
    """One worker's run through the epochs."""

    def __init__(self, job: Job, world: World, learner: Learner, desk: Desk, company: Company) -> None:
        self._company = company
        self._takes_over = world.leads and world.rejoins
        self._job = job
        self._learner = learner
        self._desk = desk
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
        if self._company.over and not self._takes_over:  # it was let in when the others had stopped
            return start, start < calendar.total_steps
        first = calendar.epoch_of(start)
        self._desk.begin(first)
        through = first == self._job.learning.epochs  # when the others were saved
        if self._company.let_in or self._takes_over or through:
            self._desk.entered(self.state(start))
        if self._company.stops:
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
            presented = None if last else self._company.bear(part.present)
            self._desk.epoch_done(epoch, self.state(done), presented)
            if not last:
                self._company.bear(part.catch_up)
                self._company.bear(partial(self._company.look, done))
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
            taken = self._company.bear(partial(self._stretch, epoch, step, last))
            step, stopped = taken or (self._company.step, self._company.stops)
        return step, stopped and (step < last or epoch + 1 < self._job.learning.epochs)

    def _stretch(self, epoch: int, step: int, last: int) -> tuple[int, bool]:
        """Takes steps of an epoch until it is over, steps are left out, or someone wants to stop."""
        self._timer.begin()
        for batch in self._learner.epoch(epoch, step - self._job.calendar.start(epoch)):
            self._timer.lap("data")
            outcome = self._learner.step(batch, step)
            step, expected = self._learner.replica.part.next_step(step), step + 1
            self._tally.add(outcome.images, outcome.loss, outcome.wait_s)
            self._company.step = step
            self._activity.step_done(step)
            self._desk.step_done()
            if step >= last or outcome.stop:
                self._learner.replica.settle()
            self._timer.end_step(step)
            if self._tally.due or step >= last or outcome.stop:
                self._report(epoch, step, outcome.learning_rate)
            if outcome.stop or step != expected:
                break
            if step < last:  # else before the next epoch
                self._company.look(step)
            self._timer.begin()
        return step, outcome.stop

    def _report(self, epoch: int, step: int, learning_rate: float) -> None:
        progress = self._tally.say(epoch, step, learning_rate)
        self._desk.progress(progress)
        if cached := self._learner.cache_use():
            self._desk.progress(CacheUsed(time_s=progress.time_s, worker=progress.worker, **asdict(cached)))
        if timings := self._timer.say(progress, in_step=self._job.strategy.in_step(self._job.workers)):
            self._desk.progress(timings)

"""The worker's loop, and how those who do not lead report to the one who does."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from polyrhythm.communication.message import Kind, Message, pack_json
from polyrhythm.events import WorkerProgress
from polyrhythm.roles.job import Job
from polyrhythm.roles.leader import Leader
from polyrhythm.roles.learner import Learner
from polyrhythm.roles.tally import Tally
from polyrhythm.roles.welcome import join, share_untrained
from polyrhythm.roles.worker_state import Account, WorkerState
from polyrhythm.roles.world import LEADER, World


class Desk(Protocol):
    """Where a worker reports: at the leader's own desk, or by message."""

    def restore(self) -> WorkerState | None:
        """Gives the state to resume from, if the run is resumed."""

    def begin(self, epoch: int) -> None:
        """All replicas are equal and training starts, in this epoch."""

    def step_done(self) -> None:
        """A step has been done."""

    def progress(self, event: WorkerProgress) -> None:
        """Takes what the worker has done lately."""

    def epoch_done(self, epoch: int, state: WorkerState, presented: Tensor | None) -> None:
        """An epoch is over; what is presented is the model to be tested, where it is not this worker's own."""

    def interrupted(self, state: WorkerState) -> None:
        """This worker stops because someone was asked to."""

    def end(self, state: WorkerState) -> None:
        """This worker has left."""


class Mail:
    """The desk of a worker that does not lead: everything goes to the leader by message."""

    def __init__(self, job: Job, world: World) -> None:
        self._resume = job.keeping.resume
        self._control = world.control()

    def restore(self) -> WorkerState | None:
        """Waits for what the leader read from the checkpoint."""
        if not self._resume:
            return None
        return WorkerState.from_message(self._control.receive(LEADER)[1])

    def begin(self, epoch: int) -> None:
        """Nothing to say."""

    def step_done(self) -> None:
        """Nothing to say."""

    def progress(self, event: WorkerProgress) -> None:
        """Sends the event."""
        self._control.send(LEADER, Message(Kind.EVENT, pack_json(event.to_json())))

    def epoch_done(self, epoch: int, state: WorkerState, presented: Tensor | None) -> None:
        """Sends the state."""
        self._control.send(LEADER, state.message())

    def interrupted(self, state: WorkerState) -> None:
        """Sends the state."""
        self._control.send(LEADER, state.message())

    def end(self, state: WorkerState) -> None:
        """Sends the state."""
        self._control.send(LEADER, state.message())


def work(job: Job, world: World) -> None:
    """Trains until all epochs are done or someone wants to stop.

    Args:
        job: what to learn.
        world: where this rank is.
    """
    learner = Learner(job, world)
    desk: Desk = Leader(job, world, learner.replica) if world.leads else Mail(job, world)
    start, elapsed_s = (
        (0, join(world, learner.replica)) if world.rejoins else _begin(job, world, learner, desk)
    )
    shift = _Shift(job, world, learner, desk)
    step, stopped = shift.run(learner.replica.part.start(start), elapsed_s)
    if stopped:
        desk.interrupted(shift.state(step, stopped=True))
    learner.replica.part.end()
    desk.end(shift.state(step, stopped=stopped, final=True))


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

    def __init__(self, job: Job, world: World, learner: Learner, desk: Desk) -> None:
        self._job = job
        self._learner = learner
        self._desk = desk
        self._arrivals = world.arrivals
        self._started_at = 0
        self._tally = Tally(learner.worker, world.clock)

    def run(self, start: int, elapsed_s: float) -> tuple[int, bool]:
        """Trains from a step on; gives the number of steps done and whether it was stopped early.

        Args:
            start: the step.
            elapsed_s: for how long the others have been training.
        """
        length = self._job.steps_per_epoch
        self._started_at = start
        self._desk.begin(start // length)
        self._tally.begin(elapsed_s)
        part = self._learner.replica.part
        for epoch in range(start // length, self._job.learning.epochs):
            done, stopped = self._epoch(epoch, max(start, epoch * length))
            if stopped:
                return done, True
            last = epoch + 1 == self._job.learning.epochs
            self._desk.epoch_done(epoch, self.state(done), None if last else part.present())
            if not last:
                part.catch_up()
        return max(start, length * self._job.learning.epochs), False

    def state(self, step: int, *, stopped: bool = False, final: bool = False) -> WorkerState:
        """Takes this worker's state."""
        replica, tally = self._learner.replica, self._tally
        account = Account(
            worker=self._learner.worker,
            step=step,
            session_steps=step - self._started_at,
            session_images=tally.images,
            epoch_images=tally.epoch_images,
            epoch_loss=tally.epoch_loss,
            bytes_sent=replica.bytes_sent,
            staleness={str(key): count for key, count in replica.part.staleness.items()},
            stopped=stopped,
            final=final,
            arrivals=self._arrivals.to_json() if final and self._arrivals else {},
        )
        return WorkerState.of(replica, account, self._learner.loss_scale)

    def _epoch(self, epoch: int, step: int) -> tuple[int, bool]:
        self._tally.begin_epoch()
        last = (epoch + 1) * self._job.steps_per_epoch
        for batch in self._learner.epoch(epoch, step - epoch * self._job.steps_per_epoch):
            outcome = self._learner.step(batch, step)
            step += 1
            self._tally.add(outcome.images, outcome.loss, outcome.wait_s)
            self._desk.step_done()
            if step == last or outcome.stop:
                self._learner.replica.settle()
            if self._tally.due or step == last or outcome.stop:
                self._desk.progress(self._tally.say(epoch, step, outcome.learning_rate))
            if outcome.stop and step < last:
                return step, True
        return step, outcome.stop and epoch + 1 < self._job.learning.epochs

"""Rehearsing: a worker's steps without a model, data or results, so that only time and traffic are left.

    learning     begin ─▶ forward, backward of a network ─▶ gradients_ready ─▶ …  ─▶ test, save
    rehearsing   begin ─▶ the time that both would take  ─▶ gradients_ready ─▶ …

The strategy's parts run unchanged, on a `StandIn` for the model.
"""

from __future__ import annotations

from polyrhythm.events import WorkerProgress
from polyrhythm.roles.keeping.worker_state import Account
from polyrhythm.roles.regrouping.regroup import Member
from polyrhythm.roles.regrouping.worker_group import WorkerGroup
from polyrhythm.roles.rehearsing.coordinator import rehearsal_coordinator
from polyrhythm.roles.rehearsing.rehearsal import Rehearsal
from polyrhythm.roles.step_timer import NoTimer
from polyrhythm.roles.tally import Tally
from polyrhythm.roles.world import World
from polyrhythm.strategies.step import Step
from polyrhythm.strategies.worker_setting import WorkerSetting

_NO_LOSS = float("nan")


def _stay(place: int, present: int) -> None:
    """Goes on with the same batches among others: who is lost does not make a step longer."""


def _stay_alone(absent: tuple[int, ...], place: int, present: int) -> None:
    """Does the same where others of a group are lost."""


def rehearse(rehearsal: Rehearsal, world: World) -> None:
    """Takes all steps of one worker, or fewer if someone wants to stop.

    Args:
        rehearsal: what to take them of.
        world: where this rank is; its pace must be a drawn one, since nothing is computed. The leader emits the events
            and figures of the run.
    """
    _Rehearser(rehearsal, world.timed() if rehearsal.timings else world).run()


class _Rehearser:
    """One worker."""

    def __init__(self, rehearsal: Rehearsal, world: World) -> None:
        assert not world.pace.live, "nothing is computed here, so the pace must draw the time that it takes"
        self._rehearsal = rehearsal
        self._world = world
        self._flat = rehearsal.stand_in.flat()
        workers = world.workers()
        self._worker = workers.rank
        plan = rehearsal.plan(self._flat)
        setting = WorkerSetting(
            world.network,
            workers,
            world.cast,
            self._flat,
            plan,
            rehearsal.steps,
            rehearsal.still,
            rehearsal.sizes.head,
            rehearsal.batch_size,
            world.rejoins,
            world.incarnation,
            world.leader_returns,
        )
        self._part = rehearsal.strategy.worker(setting)
        self._announces = self._part.uses_bucket_ready and workers.size > 1
        listens = self._announces or self._part.uses_before_use
        self._shares = rehearsal.sizes.shares if listens else ()
        self._tally = Tally(self._worker, world.clock)
        self._coordinator = rehearsal_coordinator(rehearsal, world)
        member = Member(self._worker, self._part, self._flat, _stay, _stay_alone)
        self._group = WorkerGroup(world, rehearsal.strategy, workers, member, self._coordinator)
        self._regroups = self._group.regroups
        self._bytes_sent = 0
        # Asked for at every step of thousands of workers: at hand, and nobody is told who does not want to know.
        self._network, self._pace, self._stop = world.network, world.pace, world.stop
        self._still, self._batch_size = rehearsal.still, rehearsal.batch_size
        self._now = world.clock.now
        self._before_use, self._after_bucket = self._use, self._announce  # bound once
        self._timer = None if isinstance(world.timer, NoTimer) else world.timer
        self._steps_in_all, self._epoch_steps = rehearsal.steps, rehearsal.steps_per_epoch
        self._report_steps, self._learning_rate = rehearsal.steps_per_report, rehearsal.learning_rate
        self._due = 0
        self._attended = self._regroups or self._timer is not None

    def run(self) -> None:
        if self._group.let_in:
            self._coordinator.ask_to_enter()
        start = self._group.start(0)
        self._coordinator.begin(start)
        # All rehearsed ranks that may have successors share one clock, which began with the run.
        elapsed_s = self._world.clock.now() if self._world.rejoins else 0.0
        self._tally.begin(elapsed_s)
        self._world.timer.start(elapsed_s)
        if start:  # a successor says at once that it is there
            self._report(start)
        step, stopped = self._steps(start)
        self._group.end()
        self._coordinator.end(self._account(step, stopped), self._part.let_go)
        self._part.close()

    def _steps(self, start: int) -> tuple[int, bool]:
        """Takes the steps; gives how many are done, and whether it was stopped before the last."""
        done, stopped = start, self._group.stops
        while done < self._rehearsal.steps and not stopped:
            taken = self._group.run_or_regroup(lambda: self._go_on(done))  # noqa: B023
            done, stopped = taken or (self._group.step, self._group.stops)
        return done, stopped and done < self._rehearsal.steps

    def _go_on(self, done: int) -> tuple[int, bool]:
        """Takes steps until all are done or someone wants to stop; gives the same as `_steps`."""
        stop = False
        while done < self._steps_in_all and not stop:
            done, stop = self._advance(done)
        return done, stop

    def _advance(self, before: int) -> tuple[int, bool]:
        """Takes a step, and does what follows it; gives how many are done then, and whether to stop."""
        stop = self._step(before)
        done, steps = self._part.next_step(before), self._steps_in_all
        if done < self._due and not (stop or self._attended):
            return done, False
        done = steps if done > steps else done
        if self._regroups:
            self._group.step = done
        last = done == steps
        epoch_over = done // self._epoch_steps > before // self._epoch_steps
        progress = None
        self._due = self._next_due(done)
        if last or stop or done // self._report_steps > before // self._report_steps:
            progress = self._report(done)
        if epoch_over or stop:
            self._settle()
        if self._timer is not None:
            self._timer.end_step(done)
        if progress is not None:
            self._tell_timings(progress)
        if not (stop or last):
            if epoch_over:
                self._part.present()
                self._part.catch_up()
            if self._regroups:
                self._group.check(done)
        return done, stop

    def _next_due(self, done: int) -> int:
        """Gives after how many steps something more is to be done than the next."""
        lengths = (self._epoch_steps, self._report_steps)
        return min(self._steps_in_all, *(length * (done // length + 1) for length in lengths))

    def _step(self, number: int) -> bool:
        """Takes a step; gives whether to stop."""
        rehearsal, network, part, timer = self._rehearsal, self._network, self._part, self._timer
        now, still = self._now, self._still
        if timer is not None:
            timer.begin()
        images = rehearsal.images(self._worker, number)
        step = Step(number, images / self._batch_size, self._stop.requested)
        sent_before = network.bytes_sent
        part.begin(step)
        if images:
            self._pace.forward(self._shares, self._before_use)
            if not still:
                rehearsal.gradient(self._worker, number, self._flat.gradients)
            self._pace.backward(self._shares, self._after_bucket)
            if timer is not None:
                timer.lap("backward")
        computed_at_s = now()
        stop = part.gradients_ready(step, self._learning_rate)
        if timer is not None:
            timer.lap("update")
        if not still:
            self._flat.zero_gradients()
        self._bytes_sent += network.bytes_sent - sent_before
        self._tally.add(images, _NO_LOSS, now() - computed_at_s)
        return stop

    def _settle(self) -> None:
        sent_before = self._world.network.bytes_sent
        self._part.settle()
        self._bytes_sent += self._world.network.bytes_sent - sent_before

    def _use(self, bucket: int) -> None:
        if self._part.uses_before_use:
            self._part.before_use(bucket)

    def _announce(self, bucket: int) -> None:
        if self._announces:
            self._part.bucket_ready(bucket)

    def _report(self, done: int) -> WorkerProgress:
        epoch = max(0, done - 1) // self._rehearsal.steps_per_epoch
        progress = self._tally.say(epoch, done, self._rehearsal.learning_rate)
        self._coordinator.progress(progress)
        return progress

    def _tell_timings(self, progress: WorkerProgress) -> None:
        in_step = self._rehearsal.strategy.in_step(self._rehearsal.workers)
        if timings := self._world.timer.say(progress, in_step=in_step):
            self._coordinator.progress(timings)

    def _account(self, step: int, stopped: bool) -> Account:
        return Account(
            worker=self._worker,
            step=step,
            session_steps=self._tally.steps,
            session_images=self._tally.images,
            epoch_images=0,
            epoch_loss=0.0,
            bytes_sent=self._bytes_sent,
            staleness={str(key): count for key, count in self._part.staleness.items()},
            stopped=stopped,
            final=True,
        )

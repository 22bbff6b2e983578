"""Rehearsing: a worker's steps without a model, data or results, so that only time and traffic are left.

    learning     begin ─▶ forward, backward of a network ─▶ gradients_ready ─▶ …  ─▶ test, save
    rehearsing   begin ─▶ the time that both would take  ─▶ gradients_ready ─▶ …

The strategy's parts run unchanged, on a `StandIn` for the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from torch import Tensor

from polyrhythm.data.sharding import batch_images, steps_per_epoch
from polyrhythm.events import WorkerProgress
from polyrhythm.roles.company import Company
from polyrhythm.roles.regroup import Member
from polyrhythm.roles.rehearsal_desk import rehearsal_desk
from polyrhythm.roles.stand_in import StandIn
from polyrhythm.roles.tally import Tally
from polyrhythm.roles.worker_state import Account
from polyrhythm.roles.world import World
from polyrhythm.strategies.step import Step
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.strategies.worker_part import WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.model_sizes import ModelSizes
from polyrhythm.training.optimizer import OptimizerConfig
from polyrhythm.training.optimizer_plan import OptimizerPlan

Gradient = Callable[[int, int, Tensor], None]
_NO_LOSS = float("nan")
_REPORTS, _REPORTS_OF_A_WORKER = 4000, 20


def leave_zeros(worker: int, step: int, gradients: Tensor) -> None:
    """Leaves the gradients zero, as they are before every step."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What is rehearsed.

    Attributes:
        strategy: how the workers share the work.
        workers: how many there are.
        sizes: of the model.
        steps: that every worker takes.
        batch_size: of one worker, for counting images.
        epoch_images: after which an epoch is over, its last step ragged as in training; 0: all batches are full,
            and there is one epoch.
        optimizer: that the strategy runs on the stand-in, whose time is not modelled; None changes nothing.
        gradient: fills the flat gradients of a worker's step in place, given its index, the step and `(E,)` zeros.
        seed: of the times that steps take, where they are drawn.
        exact: whether every number of the model is there, as real networks need it.
        timings: whether workers tell where their steps go.
        still: whether all numbers are zeros that nothing changes, so that nobody need look at them or make them anew.
        data: its name, for people.
        model: its name, for people.
    """

    strategy: Strategy
    workers: int
    sizes: ModelSizes
    steps: int
    batch_size: int = 64
    epoch_images: int = 0
    optimizer: OptimizerConfig | None = None
    gradient: Gradient = leave_zeros
    seed: int = 0
    exact: bool = False
    timings: bool = False
    still: bool = False
    data: str = ""
    model: str = ""

    @cached_property
    def stand_in(self) -> StandIn:
        """The numbers that stand for the model on every worker."""
        if self.exact:
            return StandIn.whole(self.sizes)
        strategy = self.strategy
        return StandIn.small(self.sizes, self.workers, strategy.server_count, strategy.slices(self.workers))

    @property
    def computes_nothing(self) -> bool:
        """Whether gradients are zero, and nothing is made of them."""
        return self.gradient is leave_zeros and self.optimizer is None

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps that every worker takes in an epoch."""
        if not self.epoch_images:
            return self.steps
        return steps_per_epoch(self.epoch_images, self.workers, self.batch_size)

    @property
    def epochs(self) -> int:
        """Epochs, the last one perhaps not whole."""
        return -(-self.steps // self.steps_per_epoch)

    @cached_property
    def steps_per_report(self) -> int:
        """After how many steps a worker says what it has done: a bounded number of events, however many workers."""
        reports = min(_REPORTS_OF_A_WORKER, max(1, _REPORTS // self.workers))
        return -(-self.steps // reports)

    @cached_property
    def learning_rate(self) -> float:
        """Of every step."""
        return self.optimizer.lr if self.optimizer is not None else 0.0

    def images(self, worker: int, step: int) -> int:
        """Gives the images in a worker's batch."""
        if not self.epoch_images:
            return self.batch_size
        in_epoch = step % self.steps_per_epoch
        return batch_images(self.epoch_images, in_epoch, worker, self.workers, self.batch_size)

    def plan(self, flat: FlatParameters) -> OptimizerPlan:
        """Gives the plan of the optimiser."""
        if self.optimizer is None:
            return OptimizerPlan("SGD", (), 0.0)
        parameters = [view.parameter for view in flat.views]
        return OptimizerPlan.of(self.optimizer.create(parameters), flat)


def _stay(place: int, present: int) -> None:
    """Goes on with the same batches among others: who is lost does not make a step longer."""


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
        )
        self._part = rehearsal.strategy.worker(setting)
        self._announces = self._part.hears_buckets and workers.size > 1
        listens = self._announces or self._part.hears_use
        self._shares = rehearsal.sizes.shares if listens else ()
        self._tally = Tally(self._worker, world.clock)
        self._desk = rehearsal_desk(rehearsal, world)
        member = Member(self._worker, self._part, self._flat, _stay)
        self._company = Company(world, rehearsal.strategy, workers, member, self._desk)
        self._network = world.network
        self._now = world.clock.now
        self._bytes_sent = 0

    def run(self) -> None:
        if self._company.let_in:
            self._desk.ask_to_enter()
        start = self._company.start(0)
        self._desk.begin(start)
        # All rehearsed ranks that may have successors share one clock, which began with the run.
        elapsed_s = self._world.clock.now() if self._world.rejoins else 0.0
        self._tally.begin(elapsed_s)
        self._world.timer.start(elapsed_s)
        if start:  # a successor says at once that it is there
            self._report(start)
        step, stopped = self._steps(start)
        self._company.end()
        self._desk.end(self._account(step, stopped), self._part.let_go)

    def _steps(self, start: int) -> tuple[int, bool]:
        """Takes the steps; gives how many are done, and whether it was stopped before the last."""
        done, stopped = start, self._company.over
        while done < self._rehearsal.steps and not stopped:
            taken = self._company.bear(partial(self._go_on, done))
            done, stopped = taken or (self._company.step, self._company.over)
        return done, stopped and done < self._rehearsal.steps

    def _go_on(self, done: int) -> tuple[int, bool]:
        """Takes steps until all are done or someone wants to stop; gives the same as `_steps`."""
        stop = False
        while done < self._rehearsal.steps and not stop:
            done, stop = self._advance(done)
        return done, stop

    def _advance(self, before: int) -> tuple[int, bool]:
        """Takes a step, and does what follows it; gives how many are done then, and whether to stop."""
        rehearsal = self._rehearsal
        length, every = rehearsal.steps_per_epoch, rehearsal.steps_per_report
        self._world.timer.begin()
        stop = self._step(before)
        done = min(self._part.next_step(before), rehearsal.steps)
        self._company.step = done
        last = done == rehearsal.steps
        epoch_over = done // length > before // length
        progress = None
        if last or stop or done // every > before // every:
            progress = self._report(done)
        if epoch_over or stop:
            self._settle()
        self._world.timer.end_step(done)
        if progress is not None:
            self._tell_timings(progress)
        if not (stop or last):
            if epoch_over:
                self._part.present()
                self._part.catch_up()
            self._company.look(done)
        return done, stop

    def _step(self, number: int) -> bool:
        """Takes a step; gives whether to stop."""
        world, rehearsal, network = self._world, self._rehearsal, self._network
        images = rehearsal.images(self._worker, number)
        step = Step(number, images / rehearsal.batch_size, world.stop.wished)
        sent_before = network.bytes_sent
        self._part.begin(step)
        if images:
            world.pace.forward(self._shares, self._use)
            rehearsal.gradient(self._worker, number, self._flat.gradients)
            world.pace.backward(self._shares, self._announce)
            world.timer.lap("backward")
        computed_at = self._now()
        stop = self._part.gradients_ready(step, rehearsal.learning_rate)
        world.timer.lap("update")
        if not rehearsal.still:
            self._flat.zero_gradients()
        self._bytes_sent += network.bytes_sent - sent_before
        self._tally.add(images, _NO_LOSS, self._now() - computed_at)
        return stop

    def _settle(self) -> None:
        sent_before = self._world.network.bytes_sent
        self._part.settle()
        self._bytes_sent += self._world.network.bytes_sent - sent_before

    def _use(self, bucket: int) -> None:
        if self._part.hears_use:
            self._part.before_use(bucket)

    def _announce(self, bucket: int) -> None:
        if self._announces:
            self._part.bucket_ready(bucket)

    def _report(self, done: int) -> WorkerProgress:
        epoch = max(0, done - 1) // self._rehearsal.steps_per_epoch
        progress = self._tally.say(epoch, done, self._rehearsal.learning_rate)
        self._desk.progress(progress)
        return progress

    def _tell_timings(self, progress: WorkerProgress) -> None:
        in_step = self._rehearsal.strategy.in_step(self._rehearsal.workers)
        if timings := self._world.timer.say(progress, in_step=in_step):
            self._desk.progress(timings)

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

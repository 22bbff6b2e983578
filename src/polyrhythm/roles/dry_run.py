"""A dry run: a run without a model, data or results, which only simulates time and traffic.

A few numbers stand for the whole model, so that strategies can be run dry on thousands of ranks.

    the model     [   bucket 2   |        bucket 1        | bucket 0 ]     n numbers
    the stand-in  [  k2 numbers  |       k1 numbers       |    k0    ]     E of them; each stands for n/E

Strategies run on the stand-in unchanged; only the bytes of their messages are counted as if all n numbers
were present.

    training     begin ─▶ forward, backward of a network ─▶ gradients_ready ─▶ …  ─▶ test, save
    dry run      begin ─▶ the time that both would take  ─▶ gradients_ready ─▶ …

The loop is that of `roles/trainer.py`, with a model without computation (`DryWorkload`); servers run `roles/server.py`.
`DryDuties` are the coordinator's duties in a dry run: it emits the run's events, and makes its results from the
workers' accounts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, repeat
from math import ceil, lcm
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import HEADER_BYTES, Kind, Message, is_bare
from polyrhythm.data.balance import Balance, split
from polyrhythm.data.balances.off import Off
from polyrhythm.data.dealer import Dealer, Deck, Grant
from polyrhythm.data.dealing import batch_images, images_dealt, places_of, steps_per_epoch
from polyrhythm.events import Event, Notice, RunEnded, RunStarted
from polyrhythm.partition.ownership import dry_division
from polyrhythm.roles.balance import balancer_for
from polyrhythm.roles.checkpointing.worker_state import WorkerState
from polyrhythm.roles.control_messages import Account
from polyrhythm.roles.control_plane import ControlPlane
from polyrhythm.roles.deal import Deal, DealtBatches, deal_communicator
from polyrhythm.roles.leading.leader import Duties, EventEmitter, Leader
from polyrhythm.roles.ledger import Attendance, Ledger, ServerLosses
from polyrhythm.roles.member import Member
from polyrhythm.roles.replica import FlatReplica
from polyrhythm.roles.result import defense_figures, staleness_figures, traffic_figures
from polyrhythm.roles.step_metrics import Tally
from polyrhythm.roles.trainer import Trainer, TrainingRun
from polyrhythm.roles.world import World
from polyrhythm.strategies.divided_network import ComputesStages, CutsNetwork
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.strategy import Remarks, Strategy, Traits
from polyrhythm.strategies.worker_part import Step, WorkerPart, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters, WeightlessParameters
from polyrhythm.training.model_sizes import ModelSizes
from polyrhythm.training.optimizer import OptimizerConfig
from polyrhythm.training.optimizer_plan import OptimizerPlan

FEWEST_NUMBERS = 1024
"""Shards of servers are then true to 0.1 %."""
NUMBERS_OF_A_SLICE = 512
"""So the two numbers that travel with bucket 0, which fall to two of its slices, weigh 0.2 % of a slice."""
MOST_NUMBERS_TOGETHER = 1 << 24
"""Numbers of all workers together: 64 MiB of parameters, and as much of gradients."""
_HANDED_ON = frozenset([Kind.PUSH, Kind.PART, Kind.PARAMETERS, Kind.EVENT])


@dataclass(frozen=True)
class StandIn:
    """Proxy vector of few numbers that stands for the model.

    Attributes:
        buckets: number of numbers of each bucket, in the order of the backward pass.
        scale: number of the model's elements that one element stands for.
        dtype: dtype of the model's numbers, and of these.
        shapes: shapes of the model's parameters; empty: a matrix of one row for each bucket.
    """

    buckets: tuple[int, ...]
    scale: float = 1.0
    dtype: torch.dtype = torch.float32
    shapes: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def whole(cls, sizes: ModelSizes) -> StandIn:
        """Return a stand-in in which every number stands for itself, as real networks need it."""
        return cls(sizes.buckets, dtype=sizes.dtype, shapes=sizes.shapes)

    @classmethod
    def small(cls, sizes: ModelSizes, workers: int, servers: int, slices: int) -> StandIn:
        """Return a stand-in small enough for thousands of workers, and large enough for accurate sizes.

        The vector divides by the servers and each bucket by the slices, as those of a large model very nearly do.

        Args:
            sizes: sizes of the model; a model that is small itself stands for itself.
            workers: number of workers, each with a copy.
            servers: number of shards into which servers cut the vector.
            slices: number of pieces into which messages cut a bucket.
        """
        buckets = len(sizes.buckets)
        room = max(FEWEST_NUMBERS, MOST_NUMBERS_TOGETHER // workers)
        wanted = max(FEWEST_NUMBERS, NUMBERS_OF_A_SLICE * slices * buckets if slices > 1 else 0)
        step = lcm(slices, max(1, servers))
        numbers = step * ceil(max(min(wanted, room), slices * buckets) / step)
        if numbers >= sizes.parameters:
            return cls.whole(sizes)
        parts = _shared_out(numbers // slices, sizes.buckets)
        cut = tuple(part * slices for part in parts)
        return cls(cut, sizes.parameters / numbers, sizes.dtype, sizes.shapes)

    @property
    def numbers(self) -> int:
        """Number of numbers of the stand-in."""
        return sum(self.buckets)

    def flat(self, *, still: bool = False) -> FlatParameters:
        """Return one worker's copy: zeros, with a parameter per bucket.

        Args:
            still: whether the numbers never change.
        """
        return (self._still if still else self._pattern).another()

    @cached_property
    def _pattern(self) -> FlatParameters:
        return self._made(FlatParameters)

    @cached_property
    def _still(self) -> FlatParameters:
        return self._made(WeightlessParameters)

    def _made(self, kind: type[FlatParameters]) -> FlatParameters:
        last_first = nn.ParameterList(
            torch.zeros(count, dtype=self.dtype) for count in reversed(self.buckets)
        )
        shapes = self.shapes or tuple((1, round(count * self.scale)) for count in reversed(self.buckets))
        return kind(last_first, bucket_bytes=0, stands_for=self.scale, shapes=shapes)

    def nbytes(self, message: Message) -> int:
        """Return the bytes that a message of the model would have; text in it is not scaled."""
        tensor = message.tensor
        if tensor is None or not tensor.is_floating_point():
            return message.nbytes
        return HEADER_BYTES + round(tensor.nbytes * self.scale)


def as_it_was_sent(message: Message) -> Message:
    """Return a received message, where all gradients and parameters are zeros that never change.

    A copy of those would be the same, and accounts for most of the cost of a small message; so they are not copied, nor
    are events, which are only read, and compressed vectors, which have only a size. All else is copied:
    vectors of collectives hold numbers that count workers, and are summed in place.
    """
    return message if message.kind in _HANDED_ON or is_bare(message.tensor) else message.received()


def _shared_out(parts: int, sizes: tuple[int, ...]) -> list[int]:
    """Return `parts` divided in proportion to sizes, at least one each."""
    whole = sum(sizes)
    exact = [parts * size / whole for size in sizes]
    shares = [max(1, int(share)) for share in exact]
    places = range(len(sizes))
    while sum(shares) < parts:
        shares[max(places, key=lambda place: exact[place] - shares[place])] += 1
    while sum(shares) > parts:
        shares[max(places, key=lambda place: (shares[place] > 1, shares[place] - exact[place]))] -= 1
    return shares


Gradient = Callable[[int, int, Tensor], None]
_REPORTS, _REPORTS_OF_A_WORKER = 4000, 20


def leave_zeros(worker: int, step: int, gradients: Tensor) -> None:
    """Leave the gradients zero, as they are before every step."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Settings of a dry run.

    Attributes:
        strategy: strategy of the run.
        workers: number of workers.
        sizes: sizes of the model.
        steps: number of steps of every worker.
        batch_size: batch size of one worker, for counting images.
        epoch_images: images of an epoch, in steps that differ by at most one as in training; 0: all batches
            are full, and there is one epoch.
        drop_last: whether an incomplete last step of an epoch is dropped.
        optimizer: optimizer that the strategy runs on the stand-in, at no cost in virtual time; None changes
            nothing.
        gradient: function that fills in a worker's flat gradients in place, given its index, the step and `(E,)` zeros.
        seed: seed of random step times.
        exact: whether every number of the model exists, as real networks need it.
        timings: whether workers report the phases of their steps.
        draws: whether workers draw their batches from a common deal, as many as they would take with equal shares.
        still: whether all numbers are constant zeros, so that they need not be copied or read.
        balance: division of a global batch among synchronous workers.
        data: name of the data, for people.
        model: name of the model, for people.
    """

    strategy: Strategy
    workers: int
    sizes: ModelSizes
    steps: int
    batch_size: int = 64
    epoch_images: int = 0
    drop_last: bool = False
    optimizer: OptimizerConfig | None = None
    gradient: Gradient = leave_zeros
    seed: int = 0
    exact: bool = False
    timings: bool = False
    draws: bool = False
    still: bool = False
    balance: Balance = field(default_factory=Off)
    data: str = ""
    model: str = ""

    @cached_property
    def traits(self) -> Traits:
        """Traits of this strategy with this number of workers."""
        return self.strategy.traits(self.workers)

    @cached_property
    def faults(self) -> FaultPolicy:
        """Fault policy of such a run."""
        return self.strategy.faults(self.workers)

    @cached_property
    def stand_in(self) -> StandIn:
        """The numbers that stand for the model on every worker."""
        if self.exact:
            return StandIn.whole(self.sizes)
        return StandIn.small(self.sizes, self.workers, self.traits.servers, self.traits.slices)

    @property
    def computes_nothing(self) -> bool:
        """Whether gradients are zero, and remain unused."""
        return self.gradient is leave_zeros and self.optimizer is None

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps that every worker takes in an epoch."""
        if not self.epoch_images:
            return self.steps
        return steps_per_epoch(self._dealt(0), self.workers, self.batch_size)

    @property
    def epochs(self) -> int:
        """Number of epochs, the last one perhaps incomplete."""
        return -(-self.steps // self.steps_per_epoch)

    @cached_property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """Units of workers that draw batches together."""
        return self.traits.units(self.workers)

    def dealer(self) -> Dealer:
        """Return the dealer that assigns batches, where workers draw."""
        if not self.epoch_images:  # all batches are full: batches are counted, not images
            return Dealer(Deck((self.steps * len(self.units),), (1,)), [1] * len(self.units))
        dealt = tuple(self._dealt(epoch) for epoch in range(self.epochs))
        return Dealer(Deck(dealt, (self.batch_size,) * self.epochs), [len(unit) for unit in self.units])

    def largest_drawn(self, epoch: int, members: int) -> int:
        """Return the images of the largest batch that a unit of `members` workers draws in an epoch."""
        together = members * self.batch_size
        return len(places_of(self._dealt(epoch), 0, together)) if self.epoch_images else together

    @property
    def images_drawn(self) -> int:
        """Images of the whole run, where workers draw their batches; else 0."""
        if not self.draws:
            return 0
        if not self.epoch_images:
            return self.steps * self.workers * self.batch_size
        return sum(self._dealt(epoch) for epoch in range(self.epochs))

    @cached_property
    def steps_per_report(self) -> int:
        """Number of steps between two reports of a worker; the total number of events is bounded."""
        reports = min(_REPORTS_OF_A_WORKER, max(1, _REPORTS // self.workers))
        return -(-self.steps // reports)

    @cached_property
    def learning_rate(self) -> float:
        """Learning rate of every step."""
        return self.optimizer.lr if self.optimizer is not None else 0.0

    def images(self, worker: int, step: int) -> int:
        """Return the images in a worker's batch."""
        if not self.epoch_images:
            return self.batch_size
        epoch, in_epoch = divmod(step, self.steps_per_epoch)
        return batch_images(self._dealt(epoch), in_epoch, worker, self.workers, self.batch_size)

    def images_of_pipeline(self, step: int, pipeline: int, pipelines: int) -> int:
        """Return the images of one pipeline's batch of a step."""
        together = self.workers * self.batch_size
        if not self.epoch_images:
            return together // pipelines
        epoch, in_epoch = divmod(step, self.steps_per_epoch)
        return batch_images(self._dealt(epoch), in_epoch, pipeline, pipelines, together // pipelines)

    def images_together(self, step: int) -> int:
        """Return the images of all workers' batches of a step."""
        together = self.workers * self.batch_size
        if not self.epoch_images:
            return together
        epoch, in_epoch = divmod(step, self.steps_per_epoch)
        return len(places_of(self._dealt(epoch), in_epoch, together))

    def _dealt(self, epoch: int) -> int:
        """Return the images that an epoch deals."""
        together = self.workers * self.batch_size
        whole = images_dealt(self.epoch_images, [together], drop_last=self.drop_last)[0]
        before = epoch * steps_per_epoch(whole, 1, together)
        return min(whole, max(0, self.steps - before) * together)

    def plan(self, flat: FlatParameters) -> OptimizerPlan:
        """Return the plan of the optimizer."""
        if self.optimizer is None:
            return OptimizerPlan("SGD", (), 0.0)
        parameters = [view.parameter for view in flat.views]
        return OptimizerPlan.of(self.optimizer.create(parameters), flat)


_NO_LOSS = float("nan")


@dataclass(slots=True)
class DryBatch:
    """A batch that is only counted; see `Batch`."""

    size: int


class DryWorkload:
    """Workload without a model; see `ComputedWorkload`.

    Args:
        dry_run: settings of the dry run.
        world: context of this rank; its pace must be a drawn one, since there is no computation.

    Attributes:
        replica: stand-in for the model.
        batch_size: images of a full batch.
        rate_ratio: 1.
        report_steps: number of steps between two reports.
        calendar: assignment of steps to epochs.
        sizes: relative shares of a global batch, of the present workers; empty: all equal.
        limit: 0: memory is unlimited.
        dealt_batches: batches that this worker draws; None where it has a fixed share.
    """

    __slots__ = (
        "_announce",
        "_computed",
        "_computes_together",
        "_dry_run",
        "_gradient",
        "_pace",
        "_place",
        "_shares",
        "_timer",
        "_use",
        "_worker",
        "batch_size",
        "calendar",
        "dealt_batches",
        "limit",
        "rate_ratio",
        "replica",
        "report_steps",
        "sizes",
        "skipped",
    )

    def __init__(self, dry_run: DryRun, world: World) -> None:
        assert world.pace is not None, (
            "nothing is computed here, so the pace must draw the time that it takes"
        )
        flat = dry_run.stand_in.flat(still=dry_run.still)
        setting = WorkerSetting(
            world.network,
            world.workers(),
            world.roles,
            flat,
            dry_run.plan(flat),
            None if dry_run.draws else dry_run.steps,
            world.rejoins,
            world.leader_returns,
        )
        self.replica = FlatReplica(dry_run.strategy, world, setting, announce=True)
        self._computes_together = dry_run.traits.cuts_network and not dry_run.traits.pipelines
        if self._computes_together:
            self.replica.part_as(CutsNetwork).divide(
                dry_division(flat, dry_run.sizes, len(world.roles.workers), setting.workers.rank)
            )
        self.batch_size, self.rate_ratio = dry_run.batch_size, 1.0
        self.report_steps = dry_run.steps_per_report
        self.sizes: tuple[float, ...] = ()
        self.limit = self.skipped = 0
        self.dealt_batches: DealtBatches | None = None
        self.calendar = DryCalendar(dry_run)
        self._worker = self._place = self.replica.workers.rank
        self._dry_run = dry_run
        # Local references for the hot path of thousands of workers.
        self._pace, self._timer = world.pace, world.timer
        self._gradient = None if dry_run.still else dry_run.gradient
        self._shares = self.replica.pass_shares(dry_run.sizes.shares)
        self._use, self._announce = self.replica.use, self.replica.announce
        self._computed = _NO_LOSS, dry_run.learning_rate, True

    def share_out(self, absent: tuple[int, ...], place: int, present: int) -> None:
        """Continue with the same batches: the failure of a worker does not make the others' steps longer.

        Where shares differ, the remaining workers divide them.
        """
        self._place = place

    def share_out_apart(self, absent: tuple[int, ...], place: int, present: int) -> None:
        """Continue with the same batches."""

    def global_batch(self, epoch: int) -> int:
        """Return the images of the largest step of all workers in an epoch; of this worker's group, where it draws."""
        if self.dealt_batches is not None:
            return self._dry_run.largest_drawn(epoch, len(self.unit))
        return self._dry_run.images_together(self.calendar.start(epoch + 1) - 1)

    @property
    def unit(self) -> tuple[int, ...]:
        """Indices of the workers that draw batches together with this one."""
        return next(unit for unit in self._dry_run.units if self._worker in unit)

    def batches(self, epoch: int, start: int) -> Iterator[DryBatch]:
        """Return this worker's batches of an epoch, from a step on; see `ComputedWorkload`."""
        dry_run = self._dry_run
        if self.dealt_batches is not None:
            unit = self.unit
            place, drawn, sizes = (
                unit.index(self._worker),
                self.dealt_batches.batches(epoch, start),
                self.sizes,
            )
            if not dry_run.epoch_images:
                full = len(unit) * dry_run.batch_size
                same = DryBatch(split(full, sizes)[place] if sizes else dry_run.batch_size)
                return (same for _ in drawn)
            parts = sizes or (1.0,) * len(unit)
            return (DryBatch(split(batch.stop - batch.start, parts)[place]) for batch in drawn)
        if self.sizes:
            return (DryBatch(self._part(dry_run.images_together(step))) for step in count(start))
        if not dry_run.epoch_images:
            return repeat(DryBatch(dry_run.batch_size))
        return (DryBatch(dry_run.images(self._worker, step)) for step in count(start))

    def _part(self, images: int) -> int:
        return split(images, self.sizes)[self._place]

    def compute(self, step: Step, batch: DryBatch) -> tuple[float, float, bool]:
        """Sleep for the time of a step; its gradients are those of the dry run, mostly zeros."""
        if batch.size:
            work = batch.size / self.batch_size if self.sizes else 1.0
            shares, gradient, pace = self._shares, self._gradient, self._pace
            if gradient is None and not shares:
                pace.whole(work)
            else:
                step.learning_rate = self._computed[1]
                pace.forward(shares, self._use, work)
                if gradient is not None:
                    gradient(self._worker, step.number, self.replica.flat.gradients)
                pace.backward(shares, self._announce)
            if self._timer is not None:
                self._timer.lap("backward")
        if self._computes_together:
            self.replica.part_as(CutsNetwork).compute(step, torch.empty(batch.size, 0), _without_loss)
        return self._computed

    def part_of_test(self, place: int, parts: Sequence[int], workers: Communicator | None) -> None:
        """Return None: there are no tests."""

    def record(self, account: Account) -> WorkerState:
        """Return the account: there is no model, and no training."""
        return WorkerState(replace(account, epoch_images=0, epoch_loss=0.0), {}, {}, {})

    def cache_use(self) -> None:
        """Return None: there are no images."""

    def input_waits(self) -> tuple[float, float, float]:
        """Return zeros: there are no batches to wait for."""
        return 0.0, 0.0, 0.0

    def newly_left_out(self) -> list[str]:
        """Return nothing: there are no images."""
        return []

    def gradient_noise(self) -> None:
        """Return None: there are no gradients."""


def _without_loss(logits: Tensor, place: slice) -> Tensor:
    """Return no loss: there are no numbers to compute it from."""
    return logits


def _without_timer(part: str, what: str) -> None:
    """Do nothing: no timings were requested."""


class DryPipelineWorkload(DryWorkload):
    """A `DryWorkload` for workers that compute a batch together and sleep between their messages."""

    __slots__ = ()

    def __init__(self, dry_run: DryRun, world: World) -> None:
        super().__init__(dry_run, world)
        self.replica.part_as(ComputesStages).take_sizes(dry_run.sizes.pieces)

    def compute(self, step: Step, batch: DryBatch) -> tuple[float, float, bool]:
        """Have the workers of a pipeline take their step together."""
        dry_run, pipelines = self._dry_run, self._dry_run.traits.pipelines
        images = dry_run.images_of_pipeline(step.number, self._worker % pipelines, pipelines)
        full = dry_run.workers * self.batch_size // pipelines
        self._pace.forward((), self._use)
        lap = _without_timer if self._timer is None else self._timer.lap
        self.replica.part_as(ComputesStages).compute_dry(step, images, full, self._pace.part, lap)
        if self._gradient is not None:
            self._gradient(self._worker, step.number, self.replica.flat.gradients)
        if self._timer is not None:
            self._timer.lap("backward")
        return self._computed


class DryCalendar:
    """Epochs of a dry run, the last one perhaps incomplete; see `Calendar`.

    Args:
        dry_run: settings of the dry run.

    Attributes:
        epochs: number of epochs of the run.
        total_steps: number of steps of every worker.
    """

    def __init__(self, dry_run: DryRun) -> None:
        self.epochs = dry_run.epochs
        self.total_steps = dry_run.steps
        self._length = dry_run.steps_per_epoch

    def start(self, epoch: int) -> int:
        """Return the number of steps before an epoch; before the one after the last, of all."""
        return min(epoch * self._length, self.total_steps)

    def epoch_of(self, step: int) -> int:
        """Return the epoch of a step; the number of epochs, if the step is beyond the end."""
        return self.epochs if step >= self.total_steps else step // self._length


def work_dry(dry_run: DryRun, world: World) -> None:
    """Take all steps of one worker of a dry run, or fewer if a stop is requested from a rank.

    Args:
        dry_run: settings of the dry run.
        world: context of this rank; its pace must be a drawn one, since there is no computation. The coordinator emits
            the events and results of the run.
    """
    if dry_run.timings:
        world = world.timed()
    blocked = None
    traits = dry_run.traits
    if traits.waits_inside and (len(dry_run.sizes.buckets) > 1 or not traits.overlaps_passes):
        world, blocked = world.watched()
    workload = (DryPipelineWorkload if dry_run.traits.pipelines else DryWorkload)(dry_run, world)
    drawing = deal_communicator(world) if dry_run.draws else None
    control: ControlPlane = (
        dry_leader(dry_run, world, workload.replica.part)
        if world.leads
        else Member(world, dry_run.strategy, dry=True)
    )
    if drawing is not None:
        workload.dealt_batches = DealtBatches(
            drawing, control.await_leader, world.clock.now, world.generation
        )
    trainer = Trainer(world, dry_run.strategy, workload, control)
    control.enter()
    start = trainer.open(0)
    # All ranks of a dry run that may have replacements share one clock, which began with the run.
    elapsed_s = world.clock.now() if world.rejoins else 0.0
    if start:  # a replacement reports at once that it is present
        dealt_batches, rate = workload.dealt_batches, dry_run.learning_rate
        epoch = (
            workload.calendar.epoch_of(start - 1)
            if dealt_batches is None
            else dealt_batches.advance_to(start)
        )
        control.begin(epoch)
        first = Tally(trainer.worker, world.clock).report(epoch, start, rate)
        control.report(replace(first, time_s=elapsed_s))
    in_step = dry_run.traits.lockstep
    batch = workload.global_batch(0)
    balancer = balancer_for(
        dry_run.balance,
        dry_run.strategy,
        world,
        workload.replica.workers,
        batch,
        drawn=dry_run.draws,
        compute_time=None if blocked is None else blocked.computed_s,
        exchanger=workload.replica.part.exchanger,
    )
    run = TrainingRun(
        trainer,
        workload,
        control,
        world,
        in_step=in_step,
        balancer=balancer,
        blocked=blocked,
        staged=dry_run.traits.pipelines > 0,
    )
    run.run(start, elapsed_s)


class DryDuties(Duties):
    """Duties of the coordinator in a dry run: accounts and results only.

    Args:
        dry_run: settings of the dry run.
        world: context of this rank.
        part: worker part of worker 0, which releases the servers.
        ledger: record of the run so far.
    """

    dry = True

    def __init__(self, dry_run: DryRun, world: World, part: WorkerPart, ledger: Ledger) -> None:
        self._dry_run = dry_run
        self._world = world
        self._part = part
        self._ledger = ledger
        self._emitter = EventEmitter(world, ledger)
        if dry_run.draws:
            dealer = dry_run.dealer()
            for unit, *grant in ledger.drawn:
                dealer.note(unit, Grant(*grant))
            # There is no other reader of draws, which are many with thousands of workers.
            emit = self._emitter.emit if world.leader_returns else None
            self.deal = Deal(dealer, dry_run.units, deal_communicator(world), world.clock.now, emit)

    def emit(self, event: Event) -> None:
        """Emit a loss or a replacement."""
        self._emitter.emit(event)

    def take_up(self) -> None:
        """Continue with the time of the run."""
        assert self._ledger.began_at_s is not None, (
            "a coordinator is replaced only after training has started"
        )
        self._emitter.take_up(self._ledger.began_at_s)

    def begin(self, epoch: int) -> None:
        """Announce that the run has started, unless that has been announced."""
        if self._ledger.began:
            return
        dry_run, world = self._dry_run, self._world
        self._emitter.begin()
        world.emit(
            RunStarted(
                time_s=0,
                strategy=str(dry_run.strategy),
                data=dry_run.data,
                model=dry_run.model,
                workers=len(world.roles.workers),
                servers=len(world.roles.servers),
                epochs=dry_run.epochs,
                steps_per_epoch=dry_run.steps_per_epoch,
                parameters=dry_run.sizes.parameters,
                free_running=not dry_run.traits.waits_for_slower,
                images=dry_run.images_drawn,
            )
        )
        strategy = dry_run.strategy
        if isinstance(strategy, Remarks) and (remark := strategy.remark(dry_run.workers)):
            world.emit(Notice(time_s=0, text=remark))
        if dry_run.traits.sends_by_value and dry_run.computes_nothing:
            text = (
                f"messages of {strategy} depend on the gradients' values, and a dry run has none: messages that "
                "only large "
                "ones cause is not sent here; simulate with real gradients to see it"
            )
            world.emit(Notice(time_s=0, text=text))

    def end(self) -> None:
        """Release the servers and then the workers, and emit the results of the run."""
        leader = self.leader
        self._part.release()
        leader.servers.wait()
        seconds = self._emitter.elapsed_s
        accounts = [state.account for state in leader.workers.in_order]
        reports = [leader.servers.reports[rank] for rank in sorted(leader.servers.reports)]
        losses = leader.servers.attendance.losses
        outcome = "interrupted" if any(entry.stopped for entry in accounts) else "done"
        figures = dry_figures(self._dry_run, accounts, reports, leader.attendance, losses, seconds)
        self._world.emit(RunEnded(time_s=seconds, outcome=outcome, result=figures))
        leader.dismiss()


def dry_figures(
    dry_run: DryRun,
    accounts: list[Account],
    reports: list[dict[str, Any]],
    attendance: Attendance,
    losses: ServerLosses,
    seconds: float,
) -> dict[str, Any]:
    """Return the results of a dry run, as `train --json` prints them; results of training alone are None.

    Args:
        dry_run: settings of the dry run.
        accounts: accounts of the workers, in the order of their ranks.
        reports: reports of the servers, in the order of their ranks.
        attendance: attendance of the workers.
        losses: losses of servers.
        seconds: duration of the run.
    """
    steps = max(account.step for account in accounts)
    images = sum(account.session_images for account in accounts) + attendance.images_of_lost
    epochs = steps / dry_run.steps_per_epoch
    if dry_run.draws:  # workers take different numbers of steps
        epochs = min(1, images / dry_run.images_drawn) * dry_run.steps / dry_run.steps_per_epoch
    return {
        "run": None,
        "strategy": str(dry_run.strategy),
        "data": dry_run.data,
        "model": dry_run.model,
        "workers": dry_run.workers,
        "servers": dry_run.traits.servers,
        "steps": steps,
        "epochs": int(epochs) if epochs == int(epochs) else round(epochs, 3),
        "seconds": seconds,
        "images_per_s": images / seconds if seconds > 0 else 0.0,
        "train_loss": None,
        "test_loss": None,
        "test_top1": None,
        "test_top5": None,
        "workers_lost": attendance.lost,
        "workers_joined": attendance.joined,
        "servers_lost": losses.lost,
        "servers_joined": losses.joined,
        **traffic_figures(accounts, reports, attendance.steps_of_lost),
        "staleness": staleness_figures(accounts, reports),
        **defense_figures(reports),
        "parameters_sha256": None,
    }


def dry_leader(dry_run: DryRun, world: World, part: WorkerPart) -> Leader:
    """Return the control plane of worker 0 in a dry run.

    Args:
        dry_run: settings of the dry run.
        world: context of this rank.
        part: worker part of worker 0.
    """
    ledger = world.ledger or Ledger.of(len(world.roles.workers))
    duties = DryDuties(dry_run, world, part, ledger)
    return Leader(world, dry_run.strategy, duties, ledger)

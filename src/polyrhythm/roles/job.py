"""A job: all that a rank must know of its training run, and its calendar of steps.

The calendar assigns steps to epochs, and sets the batch sizes of each.

epoch      0           1           2     3        batches grow twofold in epoch 2
steps      0 1 2 3     4 5 6 7     8 9   10 11

An epoch begun by another number of workers has only its remaining steps, which have the
numbers of its last steps. So the following epochs, the schedules and the end of the run are where they would
be if the present workers had done all of it.

epoch      0           1           2     3        other workers did three quarters of epoch 1
steps      0 1 2 3           7     8 9   10 11

`check_network_use` refuses to run the network in a way that the strategy does not allow.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from polyrhythm.claim import UNCLAIMED, Unclaimed
from polyrhythm.communication.message import UNBOUNDED_BYTES
from polyrhythm.data.balance import Balance
from polyrhythm.data.balances.off import Off
from polyrhythm.data.dataset import Dataset
from polyrhythm.data.dealer import Dealer, Deck, Grant
from polyrhythm.data.dealing import (
    Begun,
    Stretch,
    batch_images,
    images_dealt,
    images_left,
    places_of,
    steps_per_epoch,
)
from polyrhythm.data.label_skew import LabelSkew
from polyrhythm.data.loader import Mixer
from polyrhythm.data.record import METADATA_KEY, DataRecord
from polyrhythm.errors import RequestError, RunError
from polyrhythm.evaluation.evaluate import BATCH_SIZE
from polyrhythm.evaluation.target import Target
from polyrhythm.roles.checkpoint_interval import EVERY_EPOCH, Interval
from polyrhythm.strategies.compressing import compressor_of
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.strategy import Strategy, Traits
from polyrhythm.training.batch_norm import BatchNorm
from polyrhythm.training.batch_norms.plain import Plain as PlainNorm
from polyrhythm.training.batch_schedules.constant import Constant
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.forward_pass import Execution
from polyrhythm.training.joint_optimizer import Joint
from polyrhythm.training.model_sizes import shares_of_numbers
from polyrhythm.training.objective import Objective
from polyrhythm.training.optimizer import OptimizerConfig
from polyrhythm.training.optimizer_plan import clips_parts
from polyrhythm.training.schedule import BatchSchedule, RunLength, Schedule, SizeSchedule
from polyrhythm.training.size_schedules.constant import Constant as ConstantSize


class Calendar:
    """Steps of a run.

    Args:
        images: images of an epoch.
        workers: number of workers that share them.
        batch_sizes: batch size of one worker in each epoch.
        begun: progress of other numbers of workers in unfinished epochs.
        drop_last: whether an incomplete last step of an epoch is dropped.
        steps: number of steps of every worker, after which the run ends inside its last epoch; 0: it ends with it.

    Attributes:
        epochs: number of epochs of the run.
        dealt: images of its order that each epoch deals.
        total_steps: number of the last step of every worker plus one.
    """

    def __init__(
        self,
        images: int,
        workers: int,
        batch_sizes: tuple[int, ...],
        begun: Begun | None = None,
        *,
        drop_last: bool = False,
        steps: int = 0,
    ) -> None:
        self.epochs = len(batch_sizes)
        self._workers = workers
        self._batch_sizes = batch_sizes
        self._begun = begun or Begun()
        stretches = [self._begun.epochs.get(epoch, ()) for epoch in range(self.epochs)]
        whole = images_dealt(images, [workers * size for size in batch_sizes], drop_last=drop_last)
        # An epoch begun by others keeps their division.
        together = [
            (len(before[0]) if before else workers) * size
            for before, size in zip(stretches, batch_sizes, strict=True)
        ]
        self.dealt = images_dealt(images, together, drop_last=drop_last, steps=steps)
        self._images = [
            images_left(dealt, before, size)
            for dealt, before, size in zip(self.dealt, stretches, batch_sizes, strict=True)
        ]
        per_epoch = [
            steps_per_epoch(dealt, workers, size) for dealt, size in zip(whole, batch_sizes, strict=True)
        ]
        self._usual = (0, *accumulate(per_epoch))
        self._ends_early = self.dealt[-1] < whole[-1] and not stretches[-1]
        self._starts = self._with_what_is_left()
        self.total_steps = self._starts[-1]

    @property
    def length(self) -> RunLength:
        """Length of the run, for schedules."""
        epochs, first = len(self._batch_sizes), self._batch_sizes[0]
        grows = first != self._batch_sizes[-1]
        steps = self.total_steps if self._ends_early else 0
        return RunLength(self._usual[1], epochs, first * self._workers, self._usual if grows else (), steps)

    def start(self, epoch: int) -> int:
        """Return the number of steps before an epoch; before the one after the last, of all."""
        return self._starts[epoch]

    def epoch_of(self, step: int) -> int:
        """Return the epoch of a step; the number of epochs, if the step is beyond the end."""
        return min(bisect_right(self._starts, step) - 1, len(self._batch_sizes))

    def epochs_done(self, step: int) -> float:
        """Return the number of epochs in `step` steps, an integer where possible."""
        epoch = self.epoch_of(step)
        if epoch == self.epochs:
            if not self._ends_early:
                return epoch
            epoch, step = epoch - 1, self.total_steps
        end = self._starts[epoch + 1] if epoch + 1 < self.epochs else self._usual[-1]
        left, steps = end - step, self._usual[epoch + 1] - self._usual[epoch]
        return epoch if left == steps else round(epoch + 1 - left / steps, 3)

    def batch_size(self, epoch: int) -> int:
        """Return the images of a full batch of one worker."""
        return self._batch_sizes[min(epoch, len(self._batch_sizes) - 1)]

    def largest_step(self, epoch: int) -> int:
        """Return the images of the largest step of all workers in an epoch; the smallest has at most one less."""
        epoch = min(epoch, self.epochs - 1)
        together = self._workers * self._batch_sizes[epoch]
        last = steps_per_epoch(self._images[epoch], 1, together) - 1
        return len(places_of(self._images[epoch], last, together)) if last >= 0 else 0

    def work(self, epoch: int) -> float:
        """Return the computation of a step of an epoch, in units of one of the first epoch."""
        return self.batch_size(epoch) / self._batch_sizes[0]

    def images(self, step: int, worker: int) -> int:
        """Return the images in a worker's batch."""
        epoch = self.epoch_of(step)
        in_epoch = step - self._starts[epoch]
        return batch_images(self._images[epoch], in_epoch, worker, self._workers, self._batch_sizes[epoch])

    def images_left(self, epoch: int) -> int:
        """Return the images of an epoch that these workers see."""
        return self._images[epoch]

    def images_after(self, steps: Sequence[int]) -> int:
        """Return the number of remaining images of the run after each worker's given number of steps."""
        furthest = max(steps)
        whole = self.epoch_of(furthest)
        whole += whole < self.epochs and furthest > self._starts[whole]
        begun = sum(
            self.images(step, worker)
            for worker, done in enumerate(steps)
            for step in range(done, self._starts[whole])
        )
        return begun + sum(self._images[whole:])

    def begun_with(self, steps: Sequence[int]) -> dict[int, tuple[Stretch, ...]]:
        """Return the stretches of all unfinished epochs after each worker's given number of steps of the run."""
        found: dict[int, tuple[Stretch, ...]] = {}
        for epoch, (start, stop) in enumerate(zip(self._starts, self._starts[1:], strict=False)):
            taken = tuple(min(max(each, start), stop) - start for each in steps)
            stretches = self._begun.epochs.get(epoch, ())
            if any(taken):
                stretches = (*stretches, taken)
            if stretches and (found or min(taken) < stop - start):  # else it is over, as are those before it
                found[epoch] = stretches
        return found

    def _with_what_is_left(self) -> tuple[int, ...]:
        starts = list(self._usual)
        if self._ends_early:
            last = steps_per_epoch(self.dealt[-1], self._workers, self._batch_sizes[-1])
            starts[-1] = starts[-2] + last
        for epoch in range(len(self._batch_sizes) - 1, min(self._begun.epochs, default=len(starts)) - 1, -1):
            steps = steps_per_epoch(self._images[epoch], self._workers, self._batch_sizes[epoch])
            starts[epoch] = starts[epoch + 1] - steps
        return tuple(starts)


CPU = torch.device("cpu")
_NUMBER_BYTES, _VECTORS, _VECTORS_A_WORKER = 8, 8, 4
_FACTS_BYTES, _ARRIVAL_BYTES = 1 << 26, 16
Transform = Callable[[Tensor, Tensor], Tensor]
"""Takes images (B, C, H, W) and the samples' keys (B,) int64; returns images."""


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Training settings of one replica.

    Attributes:
        optimizer: optimizer, placed by the strategy on workers or on servers.
        schedule: schedule of the learning rate.
        epochs: number of passes over the training images.
        updates: number of updates of the whole run, after which its last epoch ends: steps where workers are
            synchronous, batches of all of them elsewhere; None: it ends with its images.
        drop_last: whether an incomplete last step of an epoch is dropped, and not spread.
        label_skew: assignment of images to workers by their classes; None: all see all classes alike.
        batch_size: batch size of one worker, in the first epoch.
        accumulate: number of passes in which a batch is computed, one after the other.
        batch_schedule: schedule of the batch size.
        batch_norm: images from which batch normalization takes its statistics.
        seed: seed of all random numbers.
        objective: training objective.
        precision: precision of the forward pass: `float32`, `bfloat16`, `float16` or `auto`.
        weight_average: decay of the moving average of weights that is evaluated and saved; 0 for none.
        transform: augmentation of training images.
        mixer: mixing of training images after that.
        rate_decay: ratio of each stage's learning rate to that of the stage after it; see `training.stages`.
        execution: settings for running the network.
        size_schedule: schedule of the size of training images.
        svrg: images of the full gradient at an anchor: none, the worker's own, or all; see `training.svrg`.
        all_epochs: epochs of the whole run, for schedules, where this job is its first part; None: this is
            the whole run.
    """

    optimizer: OptimizerConfig
    schedule: Schedule
    epochs: int
    batch_size: int
    batch_schedule: BatchSchedule = field(default_factory=Constant)
    seed: int = 0
    objective: Objective = field(default_factory=Objective)
    precision: str = "float32"
    weight_average: float = 0.0
    transform: Transform | None = None
    mixer: Mixer | None = None
    rate_decay: float = 1.0
    execution: Execution = field(default_factory=Execution)
    size_schedule: SizeSchedule = field(default_factory=ConstantSize)
    updates: int | None = None
    drop_last: bool = False
    label_skew: LabelSkew | None = None
    accumulate: int = 1
    batch_norm: BatchNorm = field(default_factory=PlainNorm)
    svrg: Literal["none", "own", "all"] = "none"
    all_epochs: int | None = None

    @property
    def planned_epochs(self) -> int:
        """Number of epochs for schedules."""
        return self.epochs if self.all_epochs is None else self.all_epochs


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Files of a run.

    Attributes:
        folder: the run folder; None: nothing is written.
        checkpoints: number of newest checkpoints to keep; 0 writes none.
        resume: whether to continue from the newest complete checkpoint.
        best: whether to keep the checkpoint of the highest test accuracy as well.
        every: interval between two checkpoints.
        mirror: location of fsspec for copies of the checkpoints; None: there are none.
        tested: number of epochs at the last test of the run that is resumed; None: not known.
        claim: claim to the folder by this start of the run.
    """

    folder: Path | None = None
    checkpoints: int = 2
    resume: bool = False
    best: bool = False
    every: Interval = EVERY_EPOCH
    mirror: str | None = None
    tested: int | None = None
    claim: Unclaimed = UNCLAIMED

    @property
    def saves(self) -> bool:
        """Whether the run writes checkpoints."""
        return self.folder is not None and self.checkpoints > 0

    def due_after(self, epochs: int, *, last: bool) -> bool:
        """Whether a checkpoint is due because an epoch is over.

        Args:
            epochs: number of finished epochs.
            last: whether the run is over.
        """
        return self.saves and (last or self.best or self.every.ends_with(epochs))


@dataclass(frozen=True, kw_only=True)
class FaultTolerance:
    """Handling of failed workers, if the strategy continues without them.

    Attributes:
        min_workers: minimum number of workers; with fewer the run ends, with a checkpoint.
        vacant: number of workers' places, the last ones, that are vacant at first.
        notice_s: seconds between SIGTERM and the end of this host; None: SIGTERM has the effect of SIGINT.
        restarts: number of replacements of each worker and server within an hour.
        rescale: treatment of an absent share, for lockstep strategies. False: the others divide a failed
            worker's share of every step among themselves, so that steps keep their images; true: they leave it
            out, and lower the learning rate in proportion.
        silence_s: shortest silence of a rank, in seconds, that the watchdog reports.
        digest_every: number of steps between two comparisons of the state that all workers hold alike; 0: none.
        skips_not_finite: whether a worker takes no part in a step in which its loss or gradients are not finite; else
            the run ends.
    """

    min_workers: int = 1
    vacant: int = 0
    notice_s: float | None = None
    restarts: int = 0
    rescale: bool = False
    silence_s: float = 3.0
    digest_every: int = 0
    skips_not_finite: bool = False


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """Place and rule of the tests during a run.

    Attributes:
        continues: whether steps continue during a test, which has a process of its own.
        skips: whether tests are skipped where they take longer than the epochs between them; else steps wait.
        remark: reason for the place, for people; empty: it was asked for.
    """

    continues: bool = False
    skips: bool = False
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job.

    Attributes:
        strategy: strategy of the run.
        workers: number of workers.
        dataset: training and test data.
        make_model: function that makes a replica; called once per worker, with torch's global generator
            seeded.
        model_name: name of the model, for people.
        learning: training settings of a replica.
        checkpointing: files of the run.
        fault_tolerance: handling of failed workers.
        device: device of replicas, such as `cpu` or `cuda`.
        devices: device of each worker's replica, where they have several kinds; empty: all on `device`.
        time_shares: returns, for a replica, each bucket's share of a pass's time; used in simulated time only.
        ahead: batches that a loader prepares while the worker computes.
        timings: whether workers report the phases of their steps.
        until: test result at which training ends before its last epoch; None: it does not.
        evaluation: place and rule of the tests during the run.
        numbers: number of values in a model, with buffers; 0 where it is unknown.
        balance: division of a global batch among synchronous workers.
        draws: whether workers draw their batches from a common deal, instead of a fixed share of each epoch.
        script: grants of each unit of workers in a run that is replayed.
        begun: progress of other numbers of workers in unfinished epochs; known once a checkpoint has been read.
    """

    strategy: Strategy
    workers: int
    dataset: Dataset
    make_model: Callable[[], nn.Module]
    model_name: str
    learning: Learning
    checkpointing: CheckpointConfig = field(default_factory=CheckpointConfig)
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    device: torch.device = CPU
    devices: tuple[torch.device, ...] = ()
    time_shares: Callable[[nn.Module, FlatParameters], tuple[float, ...]] = shares_of_numbers
    ahead: int = 0
    timings: bool = False
    until: Target | None = None
    evaluation: EvaluationPlan = field(default_factory=EvaluationPlan)
    numbers: int = 0
    balance: Balance = field(default_factory=Off)
    draws: bool = False
    script: Sequence[Sequence[Grant]] | None = None
    begun: Begun = field(default_factory=Begun)

    @cached_property
    def traits(self) -> Traits:
        """Traits of this strategy with this number of workers."""
        return self.strategy.traits(self.workers)

    @cached_property
    def faults(self) -> FaultPolicy:
        """Fault policy of such a run."""
        return self.strategy.faults(self.workers)

    @cached_property
    def calendar(self) -> Calendar:
        """Assignment of steps to epochs."""
        learning = self.learning
        planned = learning.planned_epochs
        grown = [learning.batch_schedule.factor(epoch, planned) for epoch in range(learning.epochs)]
        sizes = tuple(learning.batch_size * factor for factor in grown)
        return Calendar(
            len(self.dataset.train),
            self.workers,
            sizes,
            self.begun,
            drop_last=learning.drop_last,
            steps=steps_of(learning.updates or 0, self.traits, self.workers),
        )

    @cached_property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """Units of workers that draw batches together."""
        return self.traits.units(self.workers)

    @cached_property
    def deck(self) -> Deck:
        """Images to deal, where workers draw."""
        learning, calendar = self.learning, self.calendar
        sizes = tuple(calendar.batch_size(epoch) for epoch in range(learning.epochs))
        batches = [max(1, self.workers * size // len(self.units)) for size in sizes]  # of a unit, on average
        images = images_dealt(
            len(self.dataset.train), batches, drop_last=learning.drop_last, steps=learning.updates or 0
        )
        return Deck(images, sizes)

    def dealer(self, recorded: Mapping[str, Any] | None = None) -> Dealer:
        """Return the dealer that assigns batches, where workers draw.

        Args:
            recorded: state of the dealer, where a run resumes.
        """
        sizes = [len(unit) for unit in self.units]
        if recorded:
            return Dealer.from_json(self.deck, sizes, recorded)
        dealer = Dealer(self.deck, sizes)
        if self.script is not None:
            dealer.follow(self.script)
        return dealer

    @property
    def steps_per_epoch(self) -> int:
        """Steps that every worker takes in an epoch, the first one where batches grow."""
        return self.length.steps_per_epoch

    @property
    def weight_facts(self) -> dict[str, str]:
        """Metadata needed to use the trained weights, for the header of their file."""
        dataset = self.dataset
        return {
            "model": self.model_name,
            "data": dataset.name,
            "classes": "\n".join(dataset.classes),
            "image_shape": ",".join(map(str, dataset.image_shape)),
            "shown": str(dataset.shown),
            "black": ",".join(map(str, dataset.black)),
            "white": ",".join(map(str, dataset.white)),
            METADATA_KEY: json.dumps(DataRecord.of(dataset).to_json()),
        }

    @property
    def most_message_bytes(self) -> int:
        """Upper bound of the bytes of this job's messages: the state of a server with several vectors per worker."""
        if not self.numbers:
            return UNBOUNDED_BYTES
        vectors = _VECTORS + _VECTORS_A_WORKER * self.workers
        return _NUMBER_BYTES * self.numbers * vectors + _FACTS_BYTES + self._arrivals_bytes

    @property
    def _arrivals_bytes(self) -> int:
        return _ARRIVAL_BYTES * self.calendar.total_steps * self.workers

    def continued(self, begun: Begun) -> Job:
        """Return the job of workers that resume epochs begun by others."""
        return self if begun == self.begun else replace(self, begun=begun)

    def too_few(self, left: int) -> RunError:
        """Return the error of a run that was stopped because too few workers remained."""
        folder = f" {self.checkpointing.folder}" if self.checkpointing.folder is not None else ""
        least = f"min_workers is {self.fault_tolerance.min_workers}"
        return RunError(
            f"{left} of {self.workers} workers remain, and {least}; continue with --resume{folder}"
        )

    @property
    def length(self) -> RunLength:
        """Length of the run, for schedules."""
        return self.planned.calendar.length

    @cached_property
    def planned(self) -> Job:
        """Job of the planned run, which starts with this job's epochs; schedules follow it."""
        planned = self.learning.planned_epochs
        if planned == self.learning.epochs:
            return self
        return replace(self, learning=replace(self.learning, epochs=planned, all_epochs=None))


def steps_of(updates: int, traits: Traits, workers: int) -> int:
    """Return the steps of every worker in `updates` updates of the whole run, if all take the same number."""
    if traits.lockstep or traits.skips_steps:
        return updates
    return -(-updates // len(traits.units(workers)))


def tested_at_once(job: Job) -> int:
    """Return how many images worker 0 tests at a time: with little memory, no more than a step trains."""
    if not job.traits.pipelines:
        return BATCH_SIZE
    return min(BATCH_SIZE, job.workers * job.learning.batch_size // job.traits.pipelines)


def check_network_use(strategy: Strategy, workers: int, dtype: torch.dtype, learning: Learning) -> None:
    """Check that the strategy allows this way of running the network.

    Args:
        strategy: strategy of the run.
        workers: number of workers.
        dtype: dtype of the computation.
        learning: training settings of a replica.

    Raises:
        RequestError: the check fails.
    """
    compiled, traits = learning.execution.compiled, strategy.traits(workers)
    if compiled and traits.waits_between_layers:
        raise RequestError(
            f"{strategy} waits between the layers of the network, and a compiled one has none: leave compile "
            "out, or use synchronous"
        )
    _check_optimizer(strategy, traits, dtype, learning)
    in_parts = traits.cuts_network or traits.waits_between_layers
    if in_parts and workers > 1 and learning.optimizer.clip_norm is not None:
        raise clips_parts()
    if learning.execution.checkpoints_activations:
        _check_recomputation(strategy, traits, learning)
    if learning.svrg != "none":
        _check_svrg(strategy, traits, dtype, learning)
    if not traits.cuts_network:
        return
    if learning.accumulate > 1:
        inside = f"{strategy} computes a batch in microbatches anyway: give it microbatches=, and leave accumulate out"
        whole = f"{strategy} computes a batch with the other workers, at once: leave accumulate out"
        raise RequestError(inside if traits.pipelines else whole)
    if dtype != torch.float32 or compiled:
        raise RequestError(
            f"{strategy} runs a network in parts, in full precision and not compiled: leave precision and "
            "compile out, or use synchronous"
        )
    if learning.weight_average and workers > 1:
        raise RequestError(
            f"{strategy} has no whole model to average after each step: leave weight_average out, or use synchronous"
        )


def _check_recomputation(strategy: Strategy, traits: Traits, learning: Learning) -> None:
    """Refuse activation checkpointing where something else happens in a forward pass than computing.

    Raises:
        RequestError: the check fails.
    """
    compressor, optimizer = compressor_of(strategy), learning.optimizer
    if traits.pipelines:
        raise RequestError(f"{strategy} computes activations again by itself: give it recompute=True instead")
    for happens, what in (
        (traits.cuts_network or traits.waits_between_layers, f"{strategy} exchanges"),
        (compressor is not None and compressor.from_passes, f"{strategy} collects factors"),
        (isinstance(optimizer, Joint) and optimizer.follows_network, f"{optimizer.name} collects statistics"),
        (learning.batch_norm.over_workers, f"batch_norm {learning.batch_norm} exchanges"),
        (learning.execution.compiled, "compile fuses operations"),
    ):
        if happens:
            raise RequestError(
                f"{what} inside of forward passes, which activation_checkpointing repeats: leave one of them out"
            )


def _check_svrg(strategy: Strategy, traits: Traits, dtype: torch.dtype, learning: Learning) -> None:
    """Refuse gradients at an anchor where a pass is more than computing a worker's gradient.

    Raises:
        RequestError: the check fails.
    """
    compressor, optimizer = compressor_of(strategy), learning.optimizer
    for happens, what in (
        (traits.cuts_network, f"{strategy} computes gradients jointly with other workers"),
        (traits.waits_between_layers, f"{strategy} exchanges inside of forward passes"),
        (compressor is not None and compressor.from_passes, f"{strategy} collects factors in passes"),
        (isinstance(optimizer, Joint), f"optimizer {optimizer.name} uses each worker's own gradients"),
        (learning.batch_norm.over_workers, f"batch_norm {learning.batch_norm} exchanges inside of passes"),
        (learning.execution.compiled, "compile binds a network to its parameters"),
        (dtype == torch.float16, "float16 scales each pass differently"),
    ):
        if happens:
            raise RequestError(f"{what}, and svrg repeats passes at other parameters: leave one of them out")


def _check_optimizer(strategy: Strategy, traits: Traits, dtype: torch.dtype, learning: Learning) -> None:
    """Refuse an optimizer with requirements that the strategy, or the way to run the network, does not meet.

    Raises:
        RequestError: the check fails.
    """
    optimizer = learning.optimizer
    if optimizer.follows_staleness and not traits.measures_staleness:
        raise RequestError(
            f"momentum=auto follows the staleness of single gradients, which {strategy} does not report: use "
            "parameter_server, or give a momentum"
        )
    norm = learning.batch_norm
    if norm.over_workers and not traits.mean_updates:
        raise RequestError(
            f"batch_norm {norm} needs workers that take every step together, and those of {strategy} do not: use "
            "synchronous, or --batch-norm ghost"
        )
    if norm.over_workers and (learning.accumulate > 1 or learning.execution.compiled):
        raise RequestError(
            f"batch_norm {norm} exchanges inside the passes, and all workers must make the same number of them: "
            "leave accumulate "
            "and compile out"
        )
    if not isinstance(optimizer, Joint):
        return
    if not traits.mean_updates:
        raise RequestError(
            f"optimizer {optimizer.name} looks at all workers' data between their mean gradient and its update, and "
            f"{strategy} has no such place: use synchronous, or another optimizer"
        )
    if not optimizer.follows_network:
        return
    if norm.over_workers:
        raise RequestError(
            f"optimizer {optimizer.name} repeats passes inside which batch_norm {norm} exchanges: use ghost or plain"
        )
    able = {torch.float32, torch.bfloat16} if optimizer.any_precision else {torch.float32}
    if learning.execution.compiled or dtype not in able:
        raise RequestError(
            f"optimizer {optimizer.name} follows the network layer by layer: leave compile out, and give --precision "
            "float32"
        )

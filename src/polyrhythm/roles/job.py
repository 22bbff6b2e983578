"""A job: all that a rank must know of the training that it takes part in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from polyrhythm.claim import UNCLAIMED, Unclaimed
from polyrhythm.communication.message import UNBOUNDED_BYTES
from polyrhythm.data.dataset import Dataset
from polyrhythm.data.dealing.begun import Begun
from polyrhythm.errors import RunError
from polyrhythm.roles.calendar import Calendar
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.training.batch_schedule import BatchSchedule
from polyrhythm.training.batch_schedules.constant import Constant
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.model_sizes import shares_of_numbers
from polyrhythm.training.optimizer import OptimizerConfig
from polyrhythm.training.passes.execution import Execution
from polyrhythm.training.passes.objective import Objective
from polyrhythm.training.run_length import RunLength
from polyrhythm.training.schedule import Schedule
from polyrhythm.training.size_schedule import SizeSchedule
from polyrhythm.training.size_schedules.constant import Constant as ConstantSize

CPU = torch.device("cpu")
_NUMBER_BYTES, _VECTORS, _VECTORS_A_WORKER = 8, 8, 4
_FACTS_BYTES, _ARRIVAL_BYTES = 1 << 26, 16
Transform = Callable[[Tensor, Tensor], Tensor]
"""Takes images (B, C, H, W) and the samples' keys (B,) int64; gives images."""


@dataclass(frozen=True, kw_only=True)
class Learning:
    """How one replica learns.

    Attributes:
        optimizer: where the strategy puts it, on workers or on servers.
        schedule: of the learning rate.
        epochs: passes over the training images.
        batch_size: of one worker, in the first epoch.
        batch_schedule: how batches grow later.
        seed: of everything that is random.
        objective: what is minimised.
        precision: of the forward pass: `float32`, `bfloat16`, `float16` or `auto`.
        weight_average: decay of the moving average of weights that is evaluated and saved; 0 for none.
        transform: augments training images.
        rate_decay: each stage's learning rate over that of the stage after it; see `training.stages`.
        execution: how the network is run.
        size_schedule: of the size of training pictures.
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
    rate_decay: float = 1.0
    execution: Execution = field(default_factory=Execution)
    size_schedule: SizeSchedule = field(default_factory=ConstantSize)


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """What a run leaves on disk.

    Attributes:
        folder: the run folder; None leaves nothing.
        checkpoints: how many of the newest checkpoints stay; 0 writes none.
        resume: whether to go on from the newest checkpoint that is whole.
        best: whether the checkpoint of the highest test accuracy stays besides.
        claim: to the folder, of this start of the run.
    """

    folder: Path | None = None
    checkpoints: int = 2
    resume: bool = False
    best: bool = False
    claim: Unclaimed = UNCLAIMED


@dataclass(frozen=True, kw_only=True)
class Losses:
    """How a run handles the loss of workers, where its strategy goes on without them.

    Attributes:
        min_workers: with fewer than this it ends, with a checkpoint.
        vacant: places of workers, the last ones, that nobody has at first.
        notice_s: seconds between SIGTERM and the end of this host; None where SIGTERM means no more than SIGINT.
        restarts: how many lost workers and servers get a successor.
        rescale: what those who go in step do without one. False: they share out its part of every step, so that a
            step is what it was; true: they leave it out, and lower the learning rate in proportion.
        silence_s: for which a rank may be silent at least before the watchdog speaks of it.
    """

    min_workers: int = 1
    vacant: int = 0
    notice_s: float | None = None
    restarts: int = 0
    rescale: bool = False
    silence_s: float = 3.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job.

    Attributes:
        strategy: how the workers share the work.
        workers: how many there are.
        dataset: what to learn.
        make_model: makes a replica; called once a worker, with torch's global generator seeded.
        model_name: for people.
        learning: how a replica learns.
        keeping: what stays.
        losses: how the loss of workers is handled.
        device: where replicas live, such as `cpu` or `cuda`.
        time_shares: gives, of a replica, each bucket's share of a pass's time; only simulated time looks at it.
        ahead: batches that a loader prepares while the worker computes.
        timings: whether workers tell where their steps go.
        numbers: in a model, buffers and all; 0 where nobody has counted them.
        begun: what other numbers of workers did of epochs that are not over; known once a checkpoint has been read.
    """

    strategy: Strategy
    workers: int
    dataset: Dataset
    make_model: Callable[[], nn.Module]
    model_name: str
    learning: Learning
    keeping: Keeping = field(default_factory=Keeping)
    losses: Losses = field(default_factory=Losses)
    device: torch.device = CPU
    time_shares: Callable[[nn.Module, FlatParameters], tuple[float, ...]] = shares_of_numbers
    ahead: int = 0
    timings: bool = False
    numbers: int = 0
    begun: Begun = field(default_factory=Begun)

    @cached_property
    def calendar(self) -> Calendar:
        """Which step belongs to which epoch."""
        learning = self.learning
        grown = [learning.batch_schedule.factor(epoch, learning.epochs) for epoch in range(learning.epochs)]
        sizes = tuple(learning.batch_size * factor for factor in grown)
        return Calendar(len(self.dataset.train), self.workers, sizes, self.begun)

    @property
    def steps_per_epoch(self) -> int:
        """Steps that every worker takes in an epoch, the first one where batches grow."""
        return self.length.steps_per_epoch

    @property
    def most_message_bytes(self) -> int:
        """Bytes that no message of this job exceeds: the state of a server that holds several vectors a worker."""
        if not self.numbers:
            return UNBOUNDED_BYTES
        vectors = _VECTORS + _VECTORS_A_WORKER * self.workers
        return _NUMBER_BYTES * self.numbers * vectors + _FACTS_BYTES + self._arrivals_bytes

    @property
    def _arrivals_bytes(self) -> int:
        return _ARRIVAL_BYTES * self.calendar.total_steps * self.workers

    def going_on(self, begun: Begun) -> Job:
        """Gives the job of those who go on where others have begun epochs."""
        return self if begun == self.begun else replace(self, begun=begun)

    def too_few(self, left: int) -> RunError:
        """Gives the error of a run that was stopped because so few workers were left."""
        folder = f" {self.keeping.folder}" if self.keeping.folder is not None else ""
        least = f"min_workers is {self.losses.min_workers}"
        return RunError(
            f"{left} of {self.workers} workers are left, and {least}; continue with --resume{folder}"
        )

    @property
    def length(self) -> RunLength:
        """What schedules need to know."""
        return self.calendar.length

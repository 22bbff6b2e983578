"""Common base of schedules of learning rates, batch sizes and image sizes; and the length of a run.

Learning-rate schedules: warm-up and linear scaling.

Paper: P. Goyal and others, "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017, arXiv
1706.02677.

    lr(step) = base lr * ramp(step) * decay(step),   scale = global batch / `reference_batch`

    ramp       reference_batch given           not given
    scale |         .------------          1 |    .------------
        1 |____...--                         |  .
          |                                0 |.
          +---------|------------>           +----|------------>
               end of warm-up                end of warm-up

With linear scaling the ramp rises from the unscaled rate (first step: exactly that), as in the paper. Where
the global batch is no larger than the reference there is nothing to rise to: the rate is scaled at once.
Without linear scaling it rises from 0 (first step: one part of the warm-up, since a rate of 0 would waste
it).

Batch schedules: batches may grow, in place of a learning rate that falls.

Papers: A. Devarakonda, M. Naumov, M. Garland, "AdaBatch: adaptive batch sizes for training deep neural
networks", 2017, arXiv:1712.02029; S. Smith, P. Kindermans, C. Ying, Q. Le, "Don't decay the learning rate,
increase the batch size", ICLR 2018, arXiv:1711.00489.

    lr(epoch) / batch(epoch)      is what a plan keeps constant: batch * k does what lr / k would do

Every epoch still sees every image once, in fewer steps.

Size schedules: the size of training images as a function of the epoch alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass

from polyrhythm.errors import RequestError
from polyrhythm.specs import Config
from polyrhythm.training.quantities import Count, NonNegative


@dataclass(frozen=True)
class RunLength:
    """A run's length and width.

    Attributes:
        steps_per_epoch: steps that every worker takes in an epoch, the first one where they differ.
        epochs: epochs to train.
        global_batch: images that all workers together look at for one step of each, in the first epoch.
        starts: number of steps before each epoch, and the total, if epochs differ because batches grow; else
            empty.
        steps: steps after which the run ends, where that is before the end of its last epoch; else 0.
    """

    steps_per_epoch: int
    epochs: int
    global_batch: int
    starts: tuple[int, ...] = ()
    steps: int = 0

    @property
    def total_steps(self) -> int:
        """Steps that every worker takes in the whole run."""
        return self.steps or (self.starts[-1] if self.starts else self.steps_per_epoch * self.epochs)

    @property
    def nominal_steps(self) -> float:
        """The end's place in the run as if all epochs were as long as the first."""
        return self.nominal(self.steps) if self.steps else self.steps_per_epoch * self.epochs

    def nominal(self, step: int) -> float:
        """Return the step's place in the run as if all epochs were as long as the first.

        So a schedule follows the images that have been seen, however many a step takes.
        """
        if not self.starts:
            return step
        epoch = min(bisect_right(self.starts, step), self.epochs) - 1
        start, stop = self.starts[epoch : epoch + 2]
        return self.steps_per_epoch * (epoch + (step - start) / (stop - start))


class Schedule(Config, ABC):
    """A schedule's keys; `factor` is the schedule.

    Attributes:
        warmup_epochs: length of the ramp at the start; may be a part of an epoch.
        reference_batch: images of the batch that the base learning rate was found for; None: no linear
            scaling.
    """

    warmup_epochs: NonNegative = 0.0
    reference_batch: Count | None = None

    def factor(self, step: int, run: RunLength) -> float:
        """Return the factor of the base learning rate.

        Args:
            step: steps that the worker has done before this one.
            run: the run's length. Steps beyond its end keep the last value.

        Raises:
            RequestError: the warm-up is longer than the run.
        """
        return self.factor_at(run.nominal(step), run)

    def factor_at(self, place: float, run: RunLength) -> float:
        """Return the factor of the base learning rate at a position in the run.

        Args:
            place: position in the run, in steps of all workers as if all epochs were as long as the first.
            run: the run's length. Places beyond its end keep the last value.

        Raises:
            RequestError: the warm-up is longer than the run.
        """
        if self.warmup_epochs > run.epochs:
            raise RequestError(
                f"schedule {self.name}: warmup_epochs={self.warmup_epochs:g} is longer than the run; "
                f"with epochs={run.epochs} it may be {run.epochs} at most"
            )
        warmup_steps = round(self.warmup_epochs * run.steps_per_epoch)
        scale = 1.0 if self.reference_batch is None else run.global_batch / self.reference_batch
        ramp = scale
        if place < warmup_steps:
            if self.reference_batch is None:
                ramp = min(1.0, (place + 1) / warmup_steps)
            else:
                start = min(1.0, scale)
                ramp = start + (scale - start) * place / warmup_steps
        return ramp * self.decay(place, warmup_steps, run.nominal_steps)

    @abstractmethod
    def decay(self, step: float, warmup_steps: int, total_steps: float) -> float:
        """Return the factor without warm-up and linear scaling: 1 at first."""


def elapsed(step: float, warmup_steps: int, total_steps: float) -> float:
    """Return the share of the steps after the warm-up that are done: 0 up to its end, 1 from the run's end."""
    return min(1.0, max(0, step - warmup_steps) / max(1, total_steps - warmup_steps))


class BatchSchedule(Config, ABC):
    """A batch schedule's keys; `factor` is the schedule."""

    @abstractmethod
    def factor(self, epoch: int, epochs: int) -> int:
        """Return the factor of the first epoch's batch size.

        Args:
            epoch: epoch from 0.
            epochs: epochs of the run.
        """

    def rate_factor(self, epoch: int, epochs: int) -> float:
        """Return the factor of the learning rate in addition to its own schedule.

        Args:
            epoch: epoch from 0.
            epochs: epochs of the run.
        """
        return 1.0


class SizeSchedule(Config, ABC):
    """A size schedule's keys; `side` is the schedule."""

    @abstractmethod
    def side(self, epoch: int, epochs: int, image_size: int) -> int:
        """Return the pixels a side of an epoch's training images, at most the image size.

        Args:
            epoch: epoch from 0.
            epochs: epochs of the run.
            image_size: pixels a side of the test images.
        """

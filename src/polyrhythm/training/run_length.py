"""How long a run is: what a schedule needs to know of it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class RunLength:
    """A run's length and width.

    Attributes:
        steps_per_epoch: steps that every worker takes in an epoch, the first one where they differ.
        epochs: epochs to train.
        global_batch: images that all workers together look at for one step of each, in the first epoch.
        starts: where epochs differ, because batches grow: the steps before each epoch, and in all; else empty.
    """

    steps_per_epoch: int
    epochs: int
    global_batch: int
    starts: tuple[int, ...] = ()

    @property
    def total_steps(self) -> int:
        """Steps that every worker takes in the whole run."""
        return self.starts[-1] if self.starts else self.nominal_steps

    @property
    def nominal_steps(self) -> int:
        """Steps of the whole run if all its epochs were as long as the first."""
        return self.steps_per_epoch * self.epochs

    def nominal(self, step: int) -> float:
        """Gives the step's place in the run as if all epochs were as long as the first.

        So a schedule follows the images that have been seen, however many a step takes.
        """
        if not self.starts:
            return step
        epoch = min(bisect_right(self.starts, step), self.epochs) - 1
        start, stop = self.starts[epoch : epoch + 2]
        return self.steps_per_epoch * (epoch + (step - start) / (stop - start))

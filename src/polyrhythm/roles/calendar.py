"""Which step belongs to which epoch, and how large batches are in it.

epoch      0           1           2     3        batches grow twofold in epoch 2
steps      0 1 2 3     4 5 6 7     8 9   10 11
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from polyrhythm.data.sharding import batch_images, steps_per_epoch
from polyrhythm.training.run_length import RunLength


class Calendar:
    """The steps of a run.

    Args:
        images: of an epoch.
        workers: how many share them.
        batch_sizes: of one worker, an epoch each.

    Attributes:
        total_steps: that every worker takes.
    """

    def __init__(self, images: int, workers: int, batch_sizes: tuple[int, ...]) -> None:
        self._images = images
        self._workers = workers
        self._batch_sizes = batch_sizes
        self._starts = (0, *accumulate(steps_per_epoch(images, workers, size) for size in batch_sizes))
        self.total_steps = self._starts[-1]

    @property
    def length(self) -> RunLength:
        """What schedules need to know."""
        epochs, first = len(self._batch_sizes), self._batch_sizes[0]
        grows = first != self._batch_sizes[-1]
        return RunLength(self._starts[1], epochs, first * self._workers, self._starts if grows else ())

    def start(self, epoch: int) -> int:
        """Gives the steps before an epoch; before the one after the last, all."""
        return self._starts[epoch]

    def epoch_of(self, step: int) -> int:
        """Gives the epoch that a step belongs to; how many epochs there are, if it is beyond the end."""
        return min(bisect_right(self._starts, step) - 1, len(self._batch_sizes))

    def epochs_done(self, step: int) -> float:
        """Gives the epochs that so many steps make, as a whole number where they are whole."""
        epoch = self.epoch_of(step)
        start = self._starts[epoch]
        if step == start or epoch == len(self._batch_sizes):
            return epoch
        return round(epoch + (step - start) / (self._starts[epoch + 1] - start), 3)

    def batch_size(self, epoch: int) -> int:
        """Gives the images of a full batch of one worker."""
        return self._batch_sizes[min(epoch, len(self._batch_sizes) - 1)]

    def work(self, epoch: int) -> float:
        """Gives what a step of an epoch computes, in units of one of the first epoch."""
        return self.batch_size(epoch) / self._batch_sizes[0]

    def images(self, step: int, worker: int) -> int:
        """Gives the images in a worker's batch."""
        epoch = self.epoch_of(step)
        in_epoch = step - self._starts[epoch]
        return batch_images(self._images, in_epoch, worker, self._workers, self._batch_sizes[epoch])

"""Which step belongs to which epoch, and how large batches are in it.

epoch      0           1           2     3        batches grow twofold in epoch 2
steps      0 1 2 3     4 5 6 7     8 9   10 11

Where other numbers of workers began an epoch, it has the steps that are left of it, and they have the numbers of its
last ones. So the epochs after it, schedules and the run's end are where they would be if its workers had done it all.

epoch      0           1           2     3        other workers did three quarters of epoch 1
steps      0 1 2 3           7     8 9   10 11
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from polyrhythm.data.dealing.begun import Begun, Stretch, images_left
from polyrhythm.data.dealing.sharding import batch_images, steps_per_epoch
from polyrhythm.training.run_length import RunLength


class Calendar:
    """The steps of a run.

    Args:
        images: of an epoch.
        workers: how many share them.
        batch_sizes: of one worker, an epoch each.
        begun: what others did of epochs that are not over.

    Attributes:
        total_steps: that every worker takes, the last one's number and one.
    """

    def __init__(
        self, images: int, workers: int, batch_sizes: tuple[int, ...], begun: Begun | None = None
    ) -> None:
        self._workers = workers
        self._batch_sizes = batch_sizes
        self._begun = begun or Begun()
        self._images = [
            images_left(images, self._begun.epochs.get(epoch, ()), size)
            for epoch, size in enumerate(batch_sizes)
        ]
        self._usual = (0, *accumulate(steps_per_epoch(images, workers, size) for size in batch_sizes))
        self._starts = self._with_what_is_left()
        self.total_steps = self._starts[-1]

    @property
    def length(self) -> RunLength:
        """What schedules need to know."""
        epochs, first = len(self._batch_sizes), self._batch_sizes[0]
        grows = first != self._batch_sizes[-1]
        return RunLength(self._usual[1], epochs, first * self._workers, self._usual if grows else ())

    def start(self, epoch: int) -> int:
        """Gives the steps before an epoch; before the one after the last, all."""
        return self._starts[epoch]

    def epoch_of(self, step: int) -> int:
        """Gives the epoch that a step belongs to; how many epochs there are, if it is beyond the end."""
        return min(bisect_right(self._starts, step) - 1, len(self._batch_sizes))

    def epochs_done(self, step: int) -> float:
        """Gives the epochs that so many steps make, as a whole number where they are whole."""
        epoch = self.epoch_of(step)
        if epoch == len(self._batch_sizes):
            return epoch
        left, steps = self._starts[epoch + 1] - step, self._usual[epoch + 1] - self._usual[epoch]
        return epoch if left == steps else round(epoch + 1 - left / steps, 3)

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
        return batch_images(self._images[epoch], in_epoch, worker, self._workers, self._batch_sizes[epoch])

    def images_left(self, epoch: int) -> int:
        """Gives the images of an epoch that these workers see."""
        return self._images[epoch]

    def begun_with(self, steps: Sequence[int]) -> dict[int, tuple[Stretch, ...]]:
        """Gives the stretches of all epochs that are not over when each worker has done so many steps of the run."""
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
        for epoch in range(len(self._batch_sizes) - 1, min(self._begun.epochs, default=len(starts)) - 1, -1):
            steps = steps_per_epoch(self._images[epoch], self._workers, self._batch_sizes[epoch])
            starts[epoch] = starts[epoch + 1] - steps
        return tuple(starts)

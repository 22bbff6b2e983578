"""Who sees which image when: every epoch is one seeded shuffle, dealt out to the workers like cards.

Step k of N workers with batch size b takes order[k N b : (k + 1) N b], and worker i every N-th of them:

    order      a b c d e f | g h i j k A | l m        N = 3, b = 2; the last step is ragged
    worker 0   a     d     | g     j     | l
    worker 1     b     e   |   h     k   |   m
    worker 2       c     f |     i     A |            an empty batch

So all workers together see every image once an epoch, the union of their batches is the batch of one worker
of size N b, and in a ragged last step their sizes differ by at most one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from polyrhythm.data.dealing.seeding import generator_for

if TYPE_CHECKING:
    from torch import Tensor


def epoch_order(n: int, epoch: int, seed: int) -> Tensor:
    """Gives an epoch's order: a permutation of 0 … n - 1, (n,) int64; a pure function of its arguments."""
    return torch.randperm(n, generator=generator_for("epoch order", seed, epoch))


def steps_per_epoch(n: int, workers: int, batch_size: int) -> int:
    """Gives the steps that every worker takes in an epoch of `n` images, the last one ragged or not."""
    return -(-n // (workers * batch_size))


def batch_indices(order: Tensor, step: int, worker: int, workers: int, batch_size: int) -> Tensor:
    """Gives the images of one worker's batch.

    Args:
        order: of the epoch, (n,) int64.
        step: within the epoch, from 0.
        worker: its index among the workers, from 0.
        workers: how many there are.
        batch_size: of each.

    Returns:
        (B,) int64, a view of `order`; B is `batch_size`, or less (even 0) in a ragged last step.
    """
    return dealt(order, step, worker, workers, workers * batch_size)


def dealt(order: Tensor, step: int, worker: int, workers: int, together: int) -> Tensor:
    """Gives the images of one worker's batch where a step has `together` images, however many workers share them.

    So a step stays what it is when a worker is lost, and no image is left out. See `batch_indices`.
    """
    return order[step * together : (step + 1) * together][worker::workers]


@dataclass(frozen=True)
class StandIn:
    """Whose images a worker sees beside its own, since they are not there: a part of them, as others see the rest.

    Attributes:
        absent: indices of these workers among all.
        place: of this worker among those who share them out, from 0.
        present: how many do.
    """

    absent: tuple[int, ...]
    place: int
    present: int

    def dealt(self, order: Tensor, step: int, workers: int, together: int) -> Tensor:
        """Gives the images that it sees for them; see `dealt`."""
        theirs = [dealt(order, step, worker, workers, together) for worker in self.absent]
        return torch.cat([order[:0], *theirs])[self.place :: self.present]


def dealt_in_steps(order: Tensor, steps: range, worker: int, workers: int, together: int) -> Tensor:
    """Gives the images of one worker's batches of full steps on end, one batch after another; see `dealt`.

    Args:
        order: of the epoch, (n,) int64.
        steps: one after another; none of them the ragged last one.
        worker: its index among the workers, from 0.
        workers: how many there are.
        together: images of a step; a multiple of `workers`, so that every step begins with the first worker.
    """
    return order[steps.start * together : steps.stop * together][worker::workers]


def batch_images(n: int, step: int, worker: int, workers: int, batch_size: int) -> int:
    """Gives how many images `batch_indices` would give, of an epoch of `n`."""
    left = n - step * workers * batch_size - worker
    return max(0, min(batch_size, -(-left // workers)))

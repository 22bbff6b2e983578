"""Division of every epoch among the workers: one seeded shuffle, dealt out like cards.

Step k of N workers with batch size b takes order[k N b : (k + 1) N b], and worker i every N-th of them:

    order      a b c d e f | g h i j k A | l m        N = 3, b = 2; the last step is ragged
    worker 0   a     d     | g     j     | l
    worker 1     b     e   |   h     k   |   m
    worker 2       c     f |     i     A |            an empty batch

So all workers together see every image once per epoch, the union of their batches is the batch of one worker
of size N b, and in a ragged last step their sizes differ by at most one.

An epoch that was begun with another number of workers is continued: its remaining images are dealt out again.

    order       a b c d e f g h i j k l m     2 workers, b = 2: worker 0 did two steps, worker 1 one
    worker 0    a   c   e   g
    worker 1      b   d
    left                  f   h i j k l m     is shared by 3 workers, or any number, as if it were the epoch's order

An epoch that was dealt out several times is described by several stretches, one after another; each contains the
number of steps that each of its workers did.

A fixed part of labelled images is held out for testing, with the same share of every class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyrhythm.data.seeding import generator_for


def epoch_order(n: int, epoch: int, seed: int) -> Tensor:
    """Return an epoch's order: a permutation of 0 … n - 1, (n,) int64; a pure function of its arguments."""
    return torch.randperm(n, generator=generator_for("epoch order", seed, epoch))


def steps_per_epoch(n: int, workers: int, batch_size: int) -> int:
    """Return the number of steps of every worker in an epoch of `n` images, a ragged last one included."""
    return -(-n // (workers * batch_size))


def batch_indices(order: Tensor, step: int, worker: int, workers: int, batch_size: int) -> Tensor:
    """Return the images of one worker's batch.

    Args:
        order: of the epoch, (n,) int64.
        step: within the epoch, from 0.
        worker: index of the worker, from 0.
        workers: number of workers.
        batch_size: of each worker.

    Returns:
        (B,) int64, a view of `order`; B is `batch_size`, or less (even 0) in a ragged last step.
    """
    return dealt(order, step, worker, workers, workers * batch_size)


def dealt(order: Tensor, step: int, worker: int, workers: int, together: int) -> Tensor:
    """Return the images of one worker's batch if a step has `together` images, however many workers share them.

    A step thus keeps its images when a worker is lost, and no image is left out. See `batch_indices`.
    """
    return order[step * together : (step + 1) * together][worker::workers]


@dataclass(frozen=True)
class StandIn:
    """A share of the images of absent workers, which the present workers see besides their own.

    Attributes:
        absent: indices of the absent workers among all.
        place: position of this worker among those who divide these images, from 0.
        present: number of workers who divide them.
    """

    absent: tuple[int, ...]
    place: int
    present: int

    def dealt(self, order: Tensor, step: int, workers: int, together: int) -> Tensor:
        """Return this worker's part of the absent workers' images; see `dealt`."""
        theirs = [dealt(order, step, worker, workers, together) for worker in self.absent]
        return torch.cat([order[:0], *theirs])[self.place :: self.present]


def dealt_in_steps(order: Tensor, steps: range, worker: int, workers: int, together: int) -> Tensor:
    """Return the images of one worker's batches in consecutive full steps, one batch after another; see `dealt`.

    Args:
        order: of the epoch, (n,) int64.
        steps: consecutive steps, without a ragged last one.
        worker: index of the worker, from 0.
        workers: number of workers.
        together: images of a step; a multiple of `workers`, so that every step begins with the first worker.
    """
    return order[steps.start * together : steps.stop * together][worker::workers]


def batch_images(n: int, step: int, worker: int, workers: int, batch_size: int) -> int:
    """Return the number of images in `batch_indices` for an epoch of `n` images."""
    left = n - step * workers * batch_size - worker
    return max(0, min(batch_size, -(-left // workers)))


Stretch = tuple[int, ...]
"""Number of steps that each worker did."""


@dataclass(frozen=True)
class Begun:
    """Epochs that were begun with other workers.

    Attributes:
        epochs: their stretches, oldest first, by the epoch's number. All epochs before the first of them are complete.
        left_out: images of steps that count as done but were left out by servers, over all earlier epochs.
    """

    epochs: Mapping[int, tuple[Stretch, ...]] = field(default_factory=dict)
    left_out: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict; empty if no epoch was begun with other workers."""
        if not self.epochs and not self.left_out:
            return {}
        told = {str(epoch): [list(steps) for steps in stretches] for epoch, stretches in self.epochs.items()}
        return {"epochs": told, "left_out": self.left_out}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Begun:
        """Inverse of `to_json`."""
        epochs = {
            int(epoch): tuple(tuple(map(int, steps)) for steps in stretches)
            for epoch, stretches in told.get("epochs", {}).items()
        }
        return cls(epochs, int(told.get("left_out", 0)))


def left_of(order: Tensor, stretches: Sequence[Stretch], batch_size: int) -> Tensor:
    """Return the images of an epoch that no worker has taken, in its order.

    Args:
        order: of the epoch, `(n,)` int64.
        stretches: in which it was begun.
        batch_size: of each worker, in all of them.

    Returns:
        `(m,)` int64, with m <= n.
    """
    for stretch in stretches:
        workers, places = len(stretch), torch.arange(len(order))
        together = workers * batch_size
        done = torch.tensor(stretch)[places % together % workers]
        order = order[places // together >= done]
    return order


def images_left(n: int, stretches: Sequence[Stretch], batch_size: int) -> int:
    """Return the number of images in `left_of` for an epoch of `n` images."""
    return len(left_of(torch.arange(n), stretches, batch_size)) if stretches else n


FRACTION = 0.2


def held_out(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Split images in two, deterministically: a fifth of every class, at least one image, is held out.

    A class with one image is not split.

    Args:
        labels: (n,) int64.

    Returns:
        The indices of training and test images, each ascending int64; together each index once.
    """
    tested = torch.zeros(len(labels), dtype=torch.bool)
    for label in sorted(set(labels.tolist())):
        members = (labels == label).nonzero().flatten()
        if len(members) == 1:
            continue
        shuffled = members[torch.randperm(len(members), generator=generator_for("hold-out", label))]
        tested[shuffled[: max(1, round(FRACTION * len(members)))]] = True
    return (~tested).nonzero().flatten(), tested.nonzero().flatten()

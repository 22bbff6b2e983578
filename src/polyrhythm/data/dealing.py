"""Division of every epoch among the workers: one seeded shuffle, dealt out like cards.

n images make k = ceil(n / N b) steps of N workers with batches of b. Step s takes order[n s // k : n (s + 1)
// k], and worker i the positions that are i modulo N:

    order      a b c d | e f g h i | j k l m n        n = 14, N = 3, b = 2: k = 3
    worker 0   a     d |     g     | j     m
    worker 1     b     | e     h   |   k     n
    worker 2       c   |   f     i |     l

So all workers together see every image once per epoch, and the union of their batches is the batch of one
worker of size N b. No step is ragged: the remainder is spread, so that the steps of an epoch differ by at
most one image, and so do its batches. (A last step of one image would move the parameters as far as a full
one.) With `drop_last`, an epoch is the first floor(n / N b) N b images of its order, in full batches.

An epoch that was begun with another number of workers is continued: its remaining images are dealt out again.

    order       a b c|d e f|g h i|j k l m     2 workers, b = 2: worker 0 did two steps, worker 1 one
    worker 0    a   c   e
    worker 1      b
    left              d   f g h i j k l m     is shared by 3 workers, or any number, as if it were the epoch's order

An epoch that was dealt out several times is described by several stretches, one after another; each contains the
number of steps that each of its workers did.

A part of labeled images is held out for testing, with the same share of every class. Images with names are
assigned by a hash of the file name, so that added or removed images do not change the assignment of others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from polyrhythm.data.seeding import generator_for


def epoch_order(n: int, epoch: int, seed: int) -> Tensor:
    """Return an epoch's order: a permutation of 0 … n - 1, (n,) int64; a pure function of its arguments."""
    return torch.randperm(n, generator=generator_for("epoch order", seed, epoch))


def steps_per_epoch(n: int, workers: int, batch_size: int) -> int:
    """Return the number of steps of every worker in an epoch of `n` images; no image is dropped."""
    return -(-n // (workers * batch_size))


def images_dealt(
    n: int, together: Sequence[int], *, drop_last: bool = False, steps: int = 0
) -> tuple[int, ...]:
    """Return the number of images that each epoch uses of its order.

    Args:
        n: images of an epoch.
        together: images of a full step, an epoch each.
        drop_last: whether an incomplete last step is dropped.
        steps: steps after which the last epoch ends, counted over all epochs; 0: when it has dealt its images.
    """
    found = [n - n % full if drop_last else n for full in together]
    if steps:
        before = sum(
            steps_per_epoch(dealt, 1, full) for dealt, full in zip(found[:-1], together, strict=False)
        )
        found[-1] = min(found[-1], max(1, steps - before) * together[-1])
    return tuple(found)


def places_of(n: int, step: int, together: int) -> range:
    """Return the places of a step in an order of `n` images, where a full step has `together`; none beyond the end."""
    steps = -(-n // together)
    return range(n * step // steps, n * (step + 1) // steps) if step < steps else range(n, n)


def batch_indices(order: Tensor, step: int, worker: int, workers: int, batch_size: int) -> Tensor:
    """Return the images of one worker's batch.

    Args:
        order: order of the epoch, (n,) int64.
        step: within the epoch, from 0.
        worker: index of the worker, from 0.
        workers: number of workers.
        batch_size: batch size of each worker.

    Returns:
        (B,) int64, a view of `order`; B is at most `batch_size`, and differs by at most one within an epoch.
    """
    return dealt(order, step, worker, workers, workers * batch_size)


def dealt(order: Tensor, step: int, worker: int, workers: int, together: int) -> Tensor:
    """Return the images of one worker's batch if a step has `together` images, independent of the number of workers.

    A step thus keeps its images when a worker fails, and no image is dropped. See `batch_indices`.
    """
    places = places_of(order.shape[0], step, together)
    return order[places.start + (worker - places.start) % workers : places.stop : workers]


@dataclass(frozen=True)
class StandIn:
    """A share of the images of absent workers, which the present workers see in addition to their own.

    Attributes:
        absent: indices of the absent workers among all.
        place: position of this worker among those that share these images, from 0.
        present: number of workers that share them.
    """

    absent: tuple[int, ...]
    place: int
    present: int

    def dealt(self, order: Tensor, step: int, workers: int, together: int) -> Tensor:
        """Return this worker's part of the absent workers' images; see `dealt`."""
        theirs = [dealt(order, step, worker, workers, together) for worker in self.absent]
        return torch.cat([order[:0], *theirs])[self.place :: self.present]


def batch_images(n: int, step: int, worker: int, workers: int, batch_size: int) -> int:
    """Return the number of images in `batch_indices` for an epoch of `n` images."""
    places = places_of(n, step, workers * batch_size)
    return len(range(places.start + (worker - places.start) % workers, places.stop, workers))


Stretch = tuple[int, ...]
"""Number of steps that each worker did."""


@dataclass(frozen=True)
class Begun:
    """Epochs that were begun with other workers.

    Attributes:
        epochs: stretches by number of the epoch, oldest first. All epochs before the first of them are complete.
        left_out: images of steps that count as done but were left out by servers, over all earlier epochs.
    """

    epochs: Mapping[int, tuple[Stretch, ...]] = field(default_factory=dict)
    left_out: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict; empty if no epoch was begun with other workers."""
        if not self.epochs and not self.left_out:
            return {}
        stretches_of = {
            str(epoch): [list(steps) for steps in stretches] for epoch, stretches in self.epochs.items()
        }
        return {"epochs": stretches_of, "left_out": self.left_out}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Begun:
        """Inverse of `to_json`."""
        epochs = {
            int(epoch): tuple(tuple(map(int, steps)) for steps in stretches)
            for epoch, stretches in values.get("epochs", {}).items()
        }
        return cls(epochs, int(values.get("left_out", 0)))


def left_of(order: Tensor, stretches: Sequence[Stretch], batch_size: int) -> Tensor:
    """Return the images of an epoch that no worker has taken, in its order.

    Args:
        order: order of the epoch, `(n,)` int64.
        stretches: stretches in which it was begun.
        batch_size: batch size of each worker, in all of them.

    Returns:
        `(m,)` int64, with m <= n.
    """
    for stretch in stretches:
        n, workers = len(order), len(stretch)
        if not n:
            break
        steps, places = steps_per_epoch(n, workers, batch_size), torch.arange(n)
        # The step s of a place p is the last with n s // k <= p.
        taken_in = torch.div((places + 1) * steps - 1, n, rounding_mode="floor")
        order = order[taken_in >= torch.tensor(stretch)[places % workers]]
    return order


def images_left(n: int, stretches: Sequence[Stretch], batch_size: int) -> int:
    """Return the number of images in `left_of` for an epoch of `n` images."""
    return len(left_of(torch.arange(n), stretches, batch_size)) if stretches else n


FRACTION = 0.2


def held_out(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Split images without names in two, deterministically: a fifth of every class, at least one image, is held out.

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


@dataclass(frozen=True)
class Sides:
    """The sides to which images of a run were dealt, by their names.

    Attributes:
        trained: names of images that the network may have learned from.
        held_out: names of images that were held out for testing.
    """

    trained: frozenset[str]
    held_out: frozenset[str]

    @property
    def all(self) -> frozenset[str]:
        """Names of all images."""
        return self.trained | self.held_out


BY_COUNT = "by count"
"""Dealing of runs that recorded no sides: `held_out`, which depends on the number of images."""

Dealt = Sides | str | None
"""Earlier assignment of images: these sides, `BY_COUNT`, or none (None)."""


def held_out_by_name(names: Sequence[str], labels: Tensor, before: Dealt = None) -> tuple[Tensor, Tensor]:
    """Split images in two; each image keeps the side that it had, and new ones are dealt by a hash of the file's name.

    The hash is of the last part of the name, without its folders, so moving folders moves no image to the other side. A
    fifth of every new class is held out, those with the lowest hashes. Of a class that has been dealt before, a new
    image is held out if its hash is in the lowest fifth of all hashes. A class of two or more images keeps an image on
    either side, unless all were trained on.

    Args:
        names: names of all images, with `/` between folders.
        labels: (n,) int64.
        before: earlier assignment. A name that has vanished stands for a new one with the same last part.

    Returns:
        The indices of training and test images, each ascending int64; together each index once.
    """
    if isinstance(before, str):
        return held_out(labels)
    known = before or Sides(frozenset(), frozenset())
    gone = {file_name(name): False for name in sorted(known.held_out.difference(names))}
    gone |= {file_name(name): True for name in sorted(known.trained.difference(names))}
    members: dict[int, list[int]] = defaultdict(list)
    for index, label in enumerate(labels.tolist()):
        members[label].append(index)
    tested = torch.zeros(len(labels), dtype=torch.bool)
    for own in members.values():
        tested[_tested_of(own, names, known, gone)] = True
    return (~tested).nonzero().flatten(), tested.nonzero().flatten()


def _tested_of(own: list[int], names: Sequence[str], known: Sides, gone: Mapping[str, bool]) -> list[int]:
    """Return the held-out images of a class.

    Args:
        own: the indices of its images.
        names: names of all images.
        known: sides of images that have been dealt before.
        gone: whether vanished images were trained on, by the last part of their names.
    """
    trained: list[int] = []
    tested: list[int] = []
    new: list[int] = []
    for index in own:
        name = names[index]
        if name in known.trained or name in known.held_out:
            learned: bool | None = name in known.trained
        else:
            learned = gone.get(file_name(name))
        (new if learned is None else trained if learned else tested).append(index)
    new.sort(key=lambda index: (_place_of(names[index]), names[index]))
    if not trained and not tested:
        return new[: max(1, round(FRACTION * len(new)))] if len(new) > 1 else []
    low = [index for index in new if _place_of(names[index]) < FRACTION]
    high = new[len(low) :]
    if not tested and not low and high and (trained or len(high) > 1):
        low, high = high[:1], high[1:]
    if not trained and not high and len(own) > 1:
        # None was trained on, so any may be trained on from now on.
        either = sorted([*tested, *low], key=lambda index: (_place_of(names[index]), names[index]))
        return either[:-1]
    return [*tested, *low]


def file_name(name: str) -> str:
    """Return the last part of a name, without its folders."""
    return name.rpartition("/")[2]


def _place_of(name: str) -> float:
    """Return a hash of the last part of a name, from 0 to 1."""
    digest = sha256(file_name(name).encode(errors="backslashreplace")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64

"""Stretches: what a worker did between two reports, and series of them whose length stays bounded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """What was done in one stretch of training.

    Attributes:
        end_s: when it ended, in seconds since training started.
        seconds: how long it took.
        epoch: the epoch in which it ended, from 0.
        step: steps done at its end, since the run began.
        steps: steps done in it.
        images: images seen in it.
        images_seen: images that all workers together had seen at its end.
        loss: mean training loss of its images.
        learning_rate: the one in use at its end.
        wait_s: seconds of it that were spent waiting for others.
    """

    end_s: float
    seconds: float
    epoch: int
    step: int
    steps: int
    images: int
    images_seen: int
    loss: float
    learning_rate: float
    wait_s: float

    @property
    def images_per_s(self) -> float:
        """Images seen per second; not a number if no time passed."""
        return self.images / self.seconds if self.seconds > 0 else math.nan

    @property
    def waiting_share(self) -> float:
        """The fraction of the time that was spent waiting; not a number if no time passed."""
        return self.wait_s / self.seconds if self.seconds > 0 else math.nan


def mean_loss(stretches: list[Stretch]) -> float:
    """Gives the mean loss of all images of some stretches; not a number if there are none."""
    images = sum(stretch.images for stretch in stretches)
    # An empty stretch says nothing, even if its loss is not a number.
    total = sum(stretch.loss * stretch.images for stretch in stretches if stretch.images)
    return total / images if images else math.nan


def merged(first: Stretch, second: Stretch) -> Stretch:
    """Gives the stretch that covers both; exact, since rates and means come from the sums."""
    return Stretch(
        end_s=second.end_s,
        seconds=first.seconds + second.seconds,
        epoch=second.epoch,
        step=second.step,
        steps=first.steps + second.steps,
        images=first.images + second.images,
        images_seen=second.images_seen,
        loss=mean_loss([first, second]),
        learning_rate=second.learning_rate,
        wait_s=first.wait_s + second.wait_s,
    )


class Series:
    """The stretches of one worker, or of several; neighbours merge when they become too many.

    Attributes:
        stretches: in the order in which they came, at most `limit`.
        last: the latest, as it came.
        total: all of them in one.
        added: how many were added, merged or not.
    """

    def __init__(self, first: Stretch, limit: int = 600) -> None:
        self.stretches = [first]
        self.last = first
        self.total = first
        self.added = 1
        self._limit = limit

    def add(self, stretch: Stretch) -> None:
        """Appends a stretch."""
        self.last = stretch
        self.added += 1
        self.total = merged(self.total, stretch)
        self.stretches.append(stretch)
        # A run of days must neither fill the memory of its progress display nor make a report of 100 MB.
        if len(self.stretches) > self._limit:
            self.stretches = grouped(self.stretches, 2)


def grouped(stretches: list[Stretch], size: int) -> list[Stretch]:
    """Merges every `size` neighbours into one stretch; the last group may hold fewer."""
    groups = []
    for first, *others in zip_longest(*[iter(stretches)] * size):
        assert first is not None
        group = first
        for other in others:
            group = merged(group, other) if other is not None else group
        groups.append(group)
    return groups

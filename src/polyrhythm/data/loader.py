"""Batches of one worker's share of a split, made on demand or a few ahead by a background thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from polyrhythm.data.balance import split
from polyrhythm.data.dataset import TensorSplit, read_readable
from polyrhythm.data.dealer import DrawnBatch
from polyrhythm.data.dealing import (
    StandIn,
    Stretch,
    dealt,
    epoch_order,
    images_left,
    left_of,
    places_of,
    steps_per_epoch,
)
from polyrhythm.data.label_skew import LabelSkew
from polyrhythm.data.resized import Uncut, scaled
from polyrhythm.data.seeding import sample_keys
from polyrhythm.data.shards import Streamed
from polyrhythm.errors import RequestError

if TYPE_CHECKING:
    from polyrhythm.data.dataset import Split

BLOCK_BYTES = 1 << 21
"""Bytes of images in memory that are gathered at once for several batches, so that the reads of their rows overlap."""
BLOCKS_BYTES = 1 << 26
"""Limit for the blocks of all workers together: a simulated run holds those of thousands in one process."""

Transform = Callable[[Tensor, Tensor], Tensor]
"""Maps images (B, C, H, W) and the samples' keys (B,) int64 to images."""


class Mixer(Protocol):
    """Mixes images with others of the same data."""

    def partners(self, keys: Tensor, count: int) -> Tensor:
        """Return which image, of `count`, each is mixed with, (B,) int64."""
        ...

    def __call__(
        self, images: Tensor, others: Tensor, labels: Tensor, other_labels: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the mixtures, and what they show, (B, classes) float32."""
        ...


@dataclass(frozen=True)
class Share:
    """A worker's share of every step.

    Attributes:
        worker: index of the worker, from 0.
        workers: number of workers.
        batch_size: images per worker and step.
        seed: seed of the shuffles and of the transform.
        together: images of all workers' batches of a step; 0: a full batch each.
        begun: stretches in which the epoch was begun with other workers; see `data.dealing.Begun`.
        stand_in: absent workers with images that this worker shares; None if there are none.
        sizes: the workers' relative parts of a step; empty: all alike.
        images: images of the epoch's order that are dealt; 0: all.
        parts: number of parts of a step's images where several workers see the same images; worker w sees
            part w mod `parts`. 0: each worker has images of its own.

    Raises:
        RequestError: a batch size or a number of workers below one.
    """

    worker: int
    workers: int
    batch_size: int
    seed: int
    together: int = 0
    begun: tuple[Stretch, ...] = ()
    stand_in: StandIn | None = None
    sizes: tuple[float, ...] = ()
    images: int = 0
    parts: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise RequestError(f"batch size {self.batch_size} is too small: give at least 1")
        if self.workers < 1:
            raise RequestError(f"{self.workers} workers are too few: give at least 1")
        assert 0 <= self.worker < self.workers
        # Frozen for its users; the full batch is the value of a field that was left out.
        if not self.together:
            object.__setattr__(self, "together", self.workers * self.batch_size)

    def dealt(self, order: Tensor, step: int) -> Tensor:
        """Return the images of a step, (B,) int64, of an epoch's order, (n,) int64; see `data.dealing.dealt`."""
        if self.sizes:
            places = places_of(len(order), step, self.together)
            return self.part(order[places.start : places.stop])
        parts = self.parts or self.workers
        own = dealt(order, step, self.worker % parts, parts, self.together)
        if self.stand_in is None:
            return own
        return torch.cat([own, self.stand_in.dealt(order, step, self.workers, self.together)])

    def part(self, images: Tensor) -> Tensor:
        """Return this worker's part of a global batch, (B,) int64, by `sizes`: the parts follow each other."""
        parts: tuple[Tensor, ...] = torch.split(images, list(split(len(images), self.sizes)))
        if self.stand_in is None:
            return parts[self.worker]
        theirs = torch.cat([images[:0], *(parts[worker] for worker in self.stand_in.absent)])
        return torch.cat([parts[self.worker], theirs[self.stand_in.place :: self.stand_in.present]])


@dataclass(slots=True)
class Batch:
    """One worker's batch of one step: images (B, C, H, W) float32, where B may be 0 if there are few images.

    It is never changed. The class is not frozen because one is constructed per step.

    Attributes:
        labels: (B,) int64, or (B, classes) float32 of mixed images.
        reached: images of the run completed by all workers before a drawn batch.
    """

    epoch: int
    step: int
    images: Tensor
    labels: Tensor
    reached: float = 0.0

    @property
    def size(self) -> int:
        """B."""
        return self.labels.shape[0]  # `len` of a tensor takes several times as long


@dataclass(slots=True)
class PartOfBatch(Batch):
    """A batch that several workers compute together; each of them counts its part of the images.

    Attributes:
        place: place of this worker among them.
        workers: number of workers that compute it.
    """

    place: int = 0
    workers: int = 1

    @classmethod
    def of(cls, batch: Batch, place: int, workers: int) -> PartOfBatch:
        """Return a batch with this worker's part to count."""
        return cls(batch.epoch, batch.step, batch.images, batch.labels, batch.reached, place, workers)

    @property
    def size(self) -> int:
        """Images that count as this worker's."""
        return max(0, -(-(len(self.labels) - self.place) // self.workers))


_Images = TypeVar("_Images", Batch, Tensor)


class ImageWaits:
    """Time for which batches or images were waited for since the last call of `taken`."""

    def __init__(self) -> None:
        self._seconds = self._busy_s = 0.0

    def taken(self) -> tuple[float, float]:
        """Return the seconds of waiting, and the processor time of this process in them; reset both."""
        waited = self._seconds, self._busy_s
        self._seconds = self._busy_s = 0.0
        return waited

    def of(self, made: Callable[[], _Images]) -> _Images:
        """Return the result of a call, and count the time until it is ready."""
        began_s, used_s = time.perf_counter(), time.process_time()
        found = made()
        self._seconds += time.perf_counter() - began_s
        self._busy_s += time.process_time() - used_s
        return found


class Loader:
    """Source of a worker's batches, each a pure function of split, share, transform, epoch and step.

    Args:
        split: the images; a split of windows leaves cutting them to the transform.
        share: the worker's share of the images.
        transform: applied to every batch of images; a sample's key depends on seed, epoch and image alone.
        ahead: number of batches that a background thread prepares; 0: no thread.
        mixer: function that mixes transformed images with other transformed images of the split; None: no mixing.
        skew: assignment of images to workers by their classes; None: all workers have images of all classes alike.

    Attributes:
        side: pixels a side after the final scaling; None: not scaled.
        waits: time for which batches were waited for; those that are gathered in memory alone are not counted.
        labels_only: whether images are unused, so that none need be read: batches then have (B, 0) on the
            meta device instead. Images are read nevertheless where labels depend on them: mixtures and
            streams.
    """

    def __init__(
        self,
        split: Split,
        share: Share,
        transform: Transform | None = None,
        ahead: int = 0,
        mixer: Mixer | None = None,
        skew: LabelSkew | None = None,
    ) -> None:
        self.split = split
        self.share = share
        self.transform = transform
        self.ahead = ahead
        self.mixer = mixer
        self.skew = skew
        # Asked once: to look whether something is of a protocol takes longer than to cut a small batch.
        self._streamed = split if isinstance(split, Streamed) else None
        self._read = split.uncut if isinstance(split, Uncut) and transform is not None else split.images
        kept = split if isinstance(split, TensorSplit) else None
        self._kept = None if kept is None or kept.is_finished else kept
        self._only_gathers = kept is not None and transform is None and mixer is None
        self.side: int | None = None
        self.waits = ImageWaits()
        self.labels_only = False

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in an epoch; the same for every worker."""
        share = self.share
        left = images_left(share.images or len(self.split), share.begun, share.batch_size)
        return steps_per_epoch(left, 1, share.together)

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch, from step `start` on; errors of the background thread are raised here."""
        share, order = self.share, self._order(epoch)
        steps = range(start, steps_per_epoch(len(order), 1, share.together))

        make = partial(self._batch, order, epoch)
        if self.ahead:
            return _prepared_ahead(make, steps, self.ahead, self.waits)
        if self._kept is not None and self._only_gathers and not self.share.parts:
            return self._in_blocks(self._kept, order, epoch, steps)
        return (self._timed(partial(make, step)) for step in steps)

    def of_shares(self, shares: Sequence[Share], epoch: int) -> Iterator[Batch]:
        """Yield the batches of an epoch of several shares, one after the other."""
        own = self.share
        try:
            for share in shares:
                self.share = share
                yield from self.epoch(epoch)
        finally:
            self.share = own

    def drawn(
        self, epoch: int, step: int, batches: Iterator[DrawnBatch], ready: Callable[[], bool]
    ) -> Generator[Batch, None, None]:
        """Yield this worker's part of batches that were drawn, while the epoch lasts.

        Args:
            epoch: epoch of all of them.
            step: number of the first one.
            batches: batches of this worker, or of its group, which shares each among its members.
            ready: whether the next of them is there without waiting.
        """
        order, share = self._order(epoch), self.share

        def places(drawn: DrawnBatch) -> Tensor:
            own = order[drawn.start : drawn.stop]
            if share.sizes:
                return share.part(own)
            if share.stand_in is None:
                return own[share.worker :: share.workers]
            absent = [own[worker :: share.workers] for worker in share.stand_in.absent]
            others = torch.cat([own[:0], *absent])[share.stand_in.place :: share.stand_in.present]
            return torch.cat([own[share.worker :: share.workers], others])

        def make(step: int, drawn: DrawnBatch) -> Batch:
            return self._made(epoch, step, places(drawn), drawn.reached)

        if not self.ahead:
            return (self._timed(partial(make, number, drawn)) for number, drawn in enumerate(batches, step))
        return _drawn_ahead(make, enumerate(batches, step), ready, self.ahead, self.waits)

    def _timed(self, make: Callable[[], Batch]) -> Batch:
        return make() if self._only_gathers else self.waits.of(make)

    def _order(self, epoch: int) -> Tensor:
        share = self.share
        # Some orders depend on how many began the epoch, be some of them lost now.
        began = len(share.begun[0]) if share.begun else share.together // share.batch_size
        if self._streamed is not None:
            order = self._streamed.order(epoch, share.seed, began)
        elif self.skew is not None:
            order = self.skew.order(self.split.labels, epoch, began)
        else:
            order = epoch_order(len(self.split), epoch, share.seed)
        return left_of(order[: share.images or len(order)], share.begun, share.batch_size)

    def _batch(self, order: Tensor, epoch: int, step: int) -> Batch:
        return self._made(epoch, step, self.share.dealt(order, step))

    def _made(self, epoch: int, step: int, indices: Tensor, reached: float = 0.0) -> Batch:
        if self.labels_only and self._streamed is None and self.mixer is None:
            labels = self.split.labels.index_select(0, indices)
            return Batch(epoch, step, torch.empty(len(labels), 0, device="meta"), labels, reached)
        if self._streamed is not None:
            indices, images = self._streamed.read(indices)
        else:
            indices, images = read_readable(self._read, indices)
        if self.transform is not None:
            images = self._transformed(self.transform, images, epoch, indices)
        labels = self.split.labels.index_select(0, indices)
        if self.mixer is not None:
            keys = sample_keys("mixing", self.share.seed, epoch, indices)
            partners = self.mixer.partners(keys, len(self.split))
            others, partners = self._others(indices, partners)
            if self.transform is not None:
                others = self._transformed(self.transform, others, epoch, partners)
            images, labels = self.mixer(images, others, labels, self.split.labels[partners], keys)
        if self.side is not None:
            images = scaled(images, self.side)
        return Batch(epoch, step, images, labels, reached)

    def _others(self, indices: Tensor, partners: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images of partners (B,), and their numbers; an image stands for a partner that cannot be read."""
        readable, images = read_readable(self._read, partners)
        if len(readable) == len(partners):
            return images, partners
        partners = torch.where(torch.isin(partners, readable), partners, indices)
        return self._read(partners), partners

    def _transformed(self, transform: Transform, images: Tensor, epoch: int, indices: Tensor) -> Tensor:
        return transform(images, sample_keys("transform", self.share.seed, epoch, indices))

    def _in_blocks(
        self, split: TensorSplit, order: Tensor, epoch: int, steps: range
    ) -> Generator[Batch, None, None]:
        # A block is what index_select gathers at once; each batch is made numbers of only when it is asked for,
        # so that these are still in the cache when the network reads them.
        share = self.share
        size = -(-share.together // share.workers)
        at_once = max(1, min(BLOCK_BYTES, BLOCKS_BYTES // share.workers) // max(1, size * split.kept_bytes))
        for first in range(steps.start, steps.stop, at_once):
            block = range(first, min(first + at_once, steps.stop))
            parts = [share.dealt(order, step) for step in block]
            indices, sizes = torch.cat(parts), [len(part) for part in parts]
            kept, labels = split.decoded(indices), split.labels.index_select(0, indices)
            for step, few, classes in zip(block, kept.split(sizes), labels.split(sizes), strict=True):
                images = split.normalized(few)
                if self.side is not None:
                    images = scaled(images, self.side)
                yield Batch(epoch, step, images, classes)


def _prepared_ahead(
    make: Callable[[int], Batch], steps: range, ahead: int, waits: ImageWaits
) -> Generator[Batch, None, None]:
    # One thread makes the batches in order; while the caller holds k, k+1 … k+ahead are made or waiting.
    with ThreadPoolExecutor(1, thread_name_prefix="polyrhythm-loader") as thread:
        # A single thread, so that batches are made in order; a split decodes files with threads of its own.
        waiting = deque(thread.submit(make, step) for step in steps[:ahead])
        following = iter(steps[ahead:])
        try:
            while waiting:
                first = waiting.popleft()
                if (step := next(following, None)) is not None:
                    waiting.append(thread.submit(make, step))
                yield waits.of(first.result)
        finally:
            for future in waiting:
                future.cancel()


def _drawn_ahead(
    make: Callable[[int, DrawnBatch], Batch],
    batches: Iterator[tuple[int, DrawnBatch]],
    ready: Callable[[], bool],
    ahead: int,
    waits: ImageWaits,
) -> Generator[Batch, None, None]:
    # As above, with as many made ahead as have been drawn; the caller waits for a draw only when it has no batch left.
    with ThreadPoolExecutor(1, thread_name_prefix="polyrhythm-loader") as thread:
        waiting: deque[Future[Batch]] = deque()
        try:
            while True:
                while len(waiting) <= ahead and (not waiting or ready()):
                    if (drawn := next(batches, None)) is None:
                        break
                    waiting.append(thread.submit(make, *drawn))
                if not waiting:
                    return
                yield waits.of(waiting.popleft().result)
        finally:
            for future in waiting:
                future.cancel()

"""Pictures inside tar shards, decoded a batch at a time; what cannot be decoded is counted and skipped."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyrhythm.data.pictures.images import CENTRAL_SHARE, UnreadableImage, read_pixels
from polyrhythm.data.pictures.normalization import NORMALIZATIONS, Pixels
from polyrhythm.data.shards.stream_order import stream_order
from polyrhythm.data.shards.tar_index import Record
from polyrhythm.errors import RequestError

_BATCH = 256

_log = logging.getLogger(__name__)


@runtime_checkable
class Streamed(Protocol):
    """A split that says in which order it is best read, and may leave out what it cannot read."""

    def order(self, epoch: int, seed: int, workers: int) -> Tensor:
        """Gives an epoch's order, (n,) int64; place p is read by worker p mod `workers`."""

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Gives those of `indices` (B,) that can be read, and their images (B', C, H, W)."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How records become pictures.

    Attributes:
        image_size: in pixels, of the square that is made of each.
        pixels: how they are normalised.
        buffer: of the shuffle, in records.
        bad_records: how many may be skipped in training; None: any number.
        shown: the share of the shorter side that the square has in a picture.
    """

    image_size: int
    pixels: Pixels = "imagenet"
    buffer: int = 1000
    bad_records: int | None = 100
    shown: float = CENTRAL_SHARE


class ShardSplit:
    """Labelled pictures inside tar shards.

    Args:
        shards: the files.
        records: where each picture lies, in the order of the shards.
        labels: (n,) int64.
        reading: how.

    Attributes:
        skipped: records that were bad so far, by name, with the reason.
    """

    def __init__(
        self, shards: Sequence[Path], records: Sequence[Record], labels: Tensor, reading: Reading
    ) -> None:
        self._shards = list(shards)
        self._records = list(records)
        self._labels = labels
        self._reading = reading
        self.skipped: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._records)

    @property
    def labels(self) -> Tensor:
        """The classes of all images, (n,) int64."""
        return self._labels

    def order(self, epoch: int, seed: int, workers: int) -> Tensor:
        """Gives an epoch's order; see `stream_order`."""
        counts = torch.bincount(
            torch.tensor([record.shard for record in self._records]), minlength=len(self._shards)
        )
        return stream_order(counts.tolist(), epoch, seed, workers, self._reading.buffer)

    def images(self, indices: Tensor) -> Tensor:
        """Gives the images of `indices`, (B,) int64, as (B, 3, size, size) float32, normalised.

        Raises:
            RequestError: one cannot be read.
        """
        kept, images = self.read(indices)
        if len(kept) < len(indices):
            name, reason = next(reversed(self.skipped.items()))
            raise RequestError(f"{name} cannot be read ({reason}): mend its shard")
        return images

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Gives what can be read of `indices`; see `Streamed.read`.

        Raises:
            RequestError: more records were bad than may be.
        """
        numbers = indices.tolist()
        with ThreadPoolExecutor(max(1, min(len(numbers), torch.get_num_threads()))) as threads:
            decoded = list(threads.map(self._decoded, numbers))
        good = [place for place, pixels in enumerate(decoded) if not isinstance(pixels, str)]
        for number, reason in zip(numbers, decoded, strict=True):
            if isinstance(reason, str):
                self._skip(number, reason)
        if not good:
            return indices[:0], torch.empty(0, 3, self._reading.image_size, self._reading.image_size)
        pixels = np.stack([pixels for pixels in decoded if not isinstance(pixels, str)])
        return indices[good], NORMALIZATIONS[self._reading.pixels](torch.from_numpy(pixels))

    def whole_only(self) -> ShardSplit:
        """Gives the split of those records that can be read; each is decoded once."""
        unlimited = ShardSplit(
            self._shards, self._records, self._labels, replace(self._reading, bad_records=None)
        )
        parts = [unlimited.read(part)[0] for part in torch.arange(len(self)).split(_BATCH)]
        kept = torch.cat(parts) if parts else torch.arange(0)
        most = self._reading.bad_records
        if most is not None and len(unlimited.skipped) > most:
            raise _too_many(len(unlimited.skipped), *next(iter(unlimited.skipped.items())))
        records = [self._records[index] for index in kept.tolist()]
        return ShardSplit(self._shards, records, self._labels[kept], self._reading)

    def _decoded(self, number: int) -> NDArray[np.uint8] | str:
        record = self._records[number]
        try:
            with self._shards[record.shard].open("rb") as file:
                file.seek(record.offset)
                content = file.read(record.size)
            return read_pixels(BytesIO(content), self._reading.image_size, self._reading.shown)
        except UnreadableImage as error:
            return str(error)
        except OSError as error:
            return error.strerror or str(error)

    def _skip(self, number: int, reason: str) -> None:
        record = self._records[number]
        name = f"{self._shards[record.shard]}: {record.name}"
        if name not in self.skipped:
            _log.warning("skipping %s (%s)", name, reason)
        self.skipped[name] = reason
        most = self._reading.bad_records
        if most is not None and len(self.skipped) > most:
            raise _too_many(len(self.skipped), name, reason)


def _too_many(count: int, name: str, reason: str) -> RequestError:
    return RequestError(
        f"{count} bad records, the last {name} ({reason}): mend the shards, give a higher bad_records, or "
        "--skip-unreadable"
    )

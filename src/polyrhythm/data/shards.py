"""Images in tar files that are read as a stream: their index, the order of reading, and their split.

Images are decoded a batch at a time; those that cannot be decoded are counted and skipped.

The index holds the position of every record in tar shards in the form of WebDataset: `key.jpg` next to `key.cls`, one
record per key. The headers of every shard are read once; the result is kept in the user's cache, keyed by the files'
sizes and times. So records can be read at any position, and a shard is still read from front to back.

The order: each worker reads its own shards, front to back, through a shuffle buffer.

    worker 0   shard 3 ────▶ shard 0 ────▶ …  ─▶ ┌ buffer ┐ ─▶ a random one leaves, the next record takes its place
    worker 1   shard 1 ────▶ shard 4 ────▶ …  ─▶ └ buffer ┘ ─▶

It is a pure function of seed and epoch: a resumed worker continues where it was, and nothing needs to be saved.
"""

from __future__ import annotations

import json
import logging
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import IO, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyrhythm.data.images import (
    CENTRAL_SHARE,
    NORMALIZATIONS,
    Pixels,
    UnreadableImage,
    read_pixels,
    suffixes,
)
from polyrhythm.data.seeding import generator_for
from polyrhythm.data.user_cache import cache_folder, write_whole
from polyrhythm.errors import RequestError

_BATCH = 256

_log = logging.getLogger(__name__)


@runtime_checkable
class Streamed(Protocol):
    """A split with a preferred order of reading, which may leave out what it cannot read."""

    def order(self, epoch: int, seed: int, workers: int) -> Tensor:
        """Return an epoch's order, (n,) int64; worker p mod `workers` reads position p."""

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return those of `indices` (B,) that can be read, and their images (B', C, H, W)."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Options for reading records as images; see `sources.tar_shards.TarShards`."""

    image_size: int
    pixels: Pixels = "imagenet"
    buffer: int = 1000
    bad_records: int | None = 100
    shown: float = CENTRAL_SHARE


class ShardSplit:
    """Labeled images inside tar shards; `skipped` are the bad records met so far, with their reasons."""

    def __init__(
        self, shards: Sequence[Path], records: Sequence[Record], labels: Tensor, reading: Reading
    ) -> None:
        self._shards = list(shards)
        self._records = list(records)
        self.labels = labels
        self._reading = reading
        self.skipped: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._records)

    @property
    def records(self) -> tuple[Record, ...]:
        """The records of all images, in their order."""
        return tuple(self._records)

    def order(self, epoch: int, seed: int, workers: int) -> Tensor:
        """Return an epoch's order; see `stream_order`."""
        counts = torch.bincount(
            torch.tensor([record.shard for record in self._records]), minlength=len(self._shards)
        )
        return stream_order(counts.tolist(), epoch, seed, workers, self._reading.buffer)

    def images(self, indices: Tensor) -> Tensor:
        """Return (B, 3, size, size) float32, normalized; raise `RequestError` if one cannot be read."""
        kept, images = self.read(indices)
        if len(kept) < len(indices):
            name, reason = next(reversed(self.skipped.items()))
            raise RequestError(f"{name} cannot be read ({reason}): repair its shard")
        return images

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return those of `indices` that can be read, and their images.

        Raises:
            RequestError: more records were bad than allowed.
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
        """Return the split of those records that can be read; each is decoded once."""
        unlimited = ShardSplit(
            self._shards, self._records, self.labels, replace(self._reading, bad_records=None)
        )
        parts = [unlimited.read(part)[0] for part in torch.arange(len(self)).split(_BATCH)]
        kept = torch.cat(parts) if parts else torch.arange(0)
        most = self._reading.bad_records
        if most is not None and len(unlimited.skipped) > most:
            raise _too_many(len(unlimited.skipped), *next(iter(unlimited.skipped.items())))
        records = [self._records[index] for index in kept.tolist()]
        return ShardSplit(self._shards, records, self.labels[kept], self._reading)

    def _decoded(self, number: int) -> NDArray[np.uint8] | str:
        record = self._records[number]
        try:
            return read_pixels(
                BytesIO(record.read(self._shards)), self._reading.image_size, self._reading.shown
            )
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
        f"{count} bad records, the last {name} ({reason}): repair the shards, give a higher bad_records, or "
        "--skip-unreadable"
    )


def stream_order(sizes: Sequence[int], epoch: int, seed: int, workers: int, buffer: int) -> Tensor:
    """Return an epoch's order, a permutation of all records; worker p mod `workers` reads position p.

    A worker that has finished its shards takes over from the one with most records left, so that all are read once.

    Args:
        sizes: records of each shard; they are numbered consecutively in this order.
        epoch: epoch from 0; every epoch deals the shards again.
        seed: seed of the run.
        workers: number of readers.
        buffer: records that a worker holds back to draw from; 1 keeps the order of the shards.
    """
    generator = generator_for("shards", seed, epoch)
    dealt = torch.randperm(len(sizes), generator=generator).tolist()
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    streams: list[list[int]] = [[] for _ in range(workers)]
    for shard in dealt:  # to the worker that has least, so that streams are about equally long
        shortest = min(streams, key=len)
        shortest.extend(range(starts[shard], starts[shard + 1]))
    shuffled = [
        _through_buffer(stream, buffer, generator_for("shuffle buffer", seed, epoch, worker))
        for worker, stream in enumerate(streams)
    ]
    return torch.tensor(_interleaved(shuffled), dtype=torch.int64)


def _through_buffer(stream: list[int], buffer: int, generator: torch.Generator) -> list[int]:
    held, left = stream[:buffer], []
    chances = torch.rand(len(stream), generator=generator, dtype=torch.float64).tolist()
    for number, record in enumerate(stream[buffer:]):
        place = int(chances[number] * len(held))
        left.append(held[place])
        held[place] = record
    for chance in chances[len(left) :]:
        place = int(chance * len(held))
        held[place], held[-1] = held[-1], held[place]
        left.append(held.pop())
    return left


def _interleaved(streams: list[list[int]]) -> list[int]:
    """Take from the streams in turn; instead of an empty one, from the end of the longest."""
    total = sum(map(len, streams))
    ahead = [stream[::-1] for stream in streams]
    order = []
    for place in range(total):
        own = ahead[place % len(ahead)]
        order.append(own.pop() if own else max(ahead, key=len).pop(0))
    return order


_LABELS = (".cls", ".txt", ".json")
_LABEL_KEYS = ("label", "cls", "class")
"""Keys of the label in a JSON object next to an image; the first one present is used."""
_LONGEST_LABEL_BYTES = 1 << 20


@dataclass(frozen=True)
class Record:
    """An image in a shard: number of the file, name inside it, first byte, length in bytes, and label as written."""

    shard: int
    name: str
    offset: int
    size: int
    label: str

    def read(self, shards: Sequence[Path]) -> bytes:
        """Return the bytes of the image."""
        with shards[self.shard].open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


@dataclass(frozen=True)
class TarIndex:
    """Records in the order of the shards and files, and a line for every entry that makes no sense."""

    records: tuple[Record, ...]
    faults: tuple[str, ...]


def index_shards(shards: Sequence[Path]) -> TarIndex:
    """Return the records of shards.

    Raises:
        RequestError: a file cannot be read, or is no tar file.
    """
    memory = cache_folder() / "shards" / f"{_fingerprint(shards)}.json"
    try:
        known = json.loads(memory.read_text())
        return TarIndex(tuple(Record(**entry) for entry in known["records"]), tuple(known["faults"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    records: list[Record] = []
    faults: list[str] = []
    for number, shard in enumerate(shards):
        _index(number, shard, records, faults)
    found = TarIndex(tuple(records), tuple(faults))
    try:
        write_whole(memory, json.dumps(asdict(found)).encode())
    except OSError:
        return found  # only speed is lost
    return found


def _fingerprint(shards: Sequence[Path]) -> str:
    digest = sha256()
    for path in shards:
        try:
            status = path.stat()
        except OSError as error:
            raise RequestError(f"the shard {path} cannot be read ({error.strerror})") from None
        digest.update(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _index(number: int, shard: Path, records: list[Record], faults: list[str]) -> None:
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, str] = {}
    try:
        with shard.open("rb") as file:
            for member in _members(file, shard, faults):
                key, suffix = _split(member.name)
                if suffix in suffixes():
                    images[key] = member
                elif suffix in _LABELS and member.size <= _LONGEST_LABEL_BYTES:
                    label = _label(file, member, suffix)
                    labels.update({} if label is None else {key: label})
    except OSError as error:
        raise RequestError(f"the shard {shard} cannot be read ({error.strerror})") from None
    for key, member in images.items():
        if key in labels:
            place = (member.offset_data, member.size, labels[key])
            records.append(Record(number, member.name, *place))
        else:
            faults.append(f"{shard}: {member.name} has no label next to it")


def _members(file: IO[bytes], shard: Path, faults: list[str]) -> Iterator[tarfile.TarInfo]:
    length = file.seek(0, 2)
    file.seek(0)
    try:
        opened = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 - it holds no file of its own
    except tarfile.TarError:
        raise RequestError(f"{shard} is not an uncompressed tar file: give one made by tar -cf") from None
    try:
        for member in opened:
            if member.offset_data + member.size > length:
                faults.append(f"{shard} is cut short in {member.name}")
            elif member.isfile():
                yield member
    except tarfile.TarError as error:
        faults.append(f"{shard} is damaged ({error})")


def _split(name: str) -> tuple[str, str]:
    """Split `folder/key.suffix` at the first dot of its last part, as WebDataset does."""
    folder, slash, last = name.rpartition("/")
    key, _, suffix = last.partition(".")
    return f"{folder}{slash}{key}", f".{suffix.lower()}"


def _label(file: IO[bytes], member: tarfile.TarInfo, suffix: str) -> str | None:
    before = file.tell()
    file.seek(member.offset_data)
    content = file.read(member.size)
    file.seek(before)
    try:
        text = content.decode("utf-8").strip()
        if suffix == ".json":
            found = json.loads(text)
            named = found if isinstance(found, dict) else {}
            text = str(next((named[key] for key in _LABEL_KEYS if key in named), ""))
    except ValueError:
        return None
    return text or None

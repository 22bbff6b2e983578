"""A split with decoded images in memory, or on the GPU, as many as fit.

Section 3.1 of Wu, Yan, Shan, Dang, Sun, "Deep Image: Scaling up Image Recognition", 2015, arXiv 1501.02876:
data that fit into the memory of the devices are read once.

    image    0   1   2   3   4   5   6   7        room for five: those numbered 0 to 4. An epoch asks once for each
    room   [ 0   1   2   3   4 ]                  image, in another order every time, so any five serve equally well,
    kept     1   0   1   1   0                    and none is ever evicted for another

Which images are kept does not change any result: an image from memory equals the one from its file. Ranks that were
forked after a cache was made fill it together: each image has a fixed position, and every rank that decodes it writes
the same bytes there.

What is kept of an image is its decoded bytes, which are normalized a batch at a time:

    file ── decode, scale ──▶ bytes ── normalize ──▶ numbers
                               │
                     kept here: on disk (`decoded_files`), in memory or on the GPU (`cached_split`)

Bytes take a quarter of the memory of float32, and normalizing them takes a hundredth of the time of decoding. The
limit of a cache is a size, or a share of the free memory.
"""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from polyrhythm.data.dataset import Part, Split, read_readable
from polyrhythm.data.resized import WindowSplit, whole_pictures
from polyrhythm.errors import RequestError, printable

if TYPE_CHECKING:
    from typing import Self


@runtime_checkable
class Decoding(Protocol):
    """A split that decodes images first, always to the same bytes, and normalizes them afterwards."""

    def __len__(self) -> int:
        """Return the number of images."""

    @property
    def labels(self) -> Tensor:
        """The classes of all images, (n,) int64."""

    def decoded(self, indices: Tensor) -> Tensor:
        """Return the decoded images of `indices`, (B,) int64: (B, …), all of one shape and dtype."""

    def normalized(self, decoded: Tensor) -> Tensor:
        """Return (B, C, H, W) float32 in new memory, on the device of `decoded`."""


AUTO, NONE = "auto", "none"
FREE_SHARE = 0.5
"""Share of the memory free at the start of a run that `auto` may take."""

_UNITS = {
    "": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_CGROUPS = ("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")


@dataclass(frozen=True)
class CacheLimit:
    """Limit of all caches of one host or GPU together; None: a share of what is free when the cache is made."""

    size_bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `auto`, `none`, or a size such as `4GB`, `500 MB` or `1.5GiB`.

        Raises:
            RequestError: it is none of these.
        """
        wanted = text.strip().lower()
        if wanted in (AUTO, NONE):
            return cls(None if wanted == AUTO else 0)
        found = _SIZE.fullmatch(wanted)
        if found is None or found[2] not in _UNITS:
            raise RequestError(
                f"cache {text!r} is not a size: give auto, none, or bytes such as 500MB or 4GB"
            )
        return cls(int(float(found[1]) * _UNITS[found[2]]))

    def on(self, device: torch.device) -> int:
        """Return the limit in bytes for a device's memory."""
        if self.size_bytes is not None:
            return self.size_bytes
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_bytes()
        return int(free * FREE_SHARE)


def free_bytes(system: Path = Path("/")) -> int:
    """Return the bytes of memory available to this process, on the host or in its control group; 0 if unknown."""
    available = [left for names in _CGROUPS if (left := _left(system / "sys/fs/cgroup", *names)) is not None]
    try:
        lines = (system / "proc/meminfo").read_text().splitlines()
    except OSError:
        return min(available, default=0)
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return max(0, min([*found, *available], default=0))


def _left(folder: Path, limit: str, used: str) -> int | None:
    """Return the unused bytes of a control group's limit; None if it has none."""
    try:
        return int((folder / limit).read_text()) - int((folder / used).read_text())
    except (OSError, ValueError):  # no such file, or `max`
        return None


_CPU = torch.device("cpu")
_KEPT = 1


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """Configuration of a cache: the limit for all `processes` of this host, and whether forked ones share one."""

    limit: CacheLimit
    processes: int = 1
    shared: bool = False


@dataclass(frozen=True)
class CacheUse:
    """Use of a cache since the last query: images requested, how many were cached, and the bytes it holds now."""

    images: int
    hits: int
    kept_bytes: int


class CachedSplit:
    """A cache, on `device`, of what another split decodes; see `Split`."""

    def __init__(self, split: Decoding, plan: CachePlan, device: torch.device = _CPU) -> None:
        self.source = split
        self.labels = split.labels
        self._plan = plan
        self._device = device
        self._images = self._hits = 0
        self._rows: Tensor | None = None
        self._kept = torch.empty(0, dtype=torch.uint8)
        if plan.shared:
            self._make(self._example())

    def __len__(self) -> int:
        return len(self.source)

    def images(self, indices: Tensor) -> Tensor:
        """Return the images of `indices`, (B,) int64, as (B, C, H, W) float32, normalized, on the cache's device."""
        return self.source.normalized(self._decoded(indices))

    def whole(self, indices: Tensor, shorter_side: int) -> list[Tensor]:
        """Return the whole images of `indices`, which are not cached; see `whole_pictures`."""
        return whole_pictures(self.source, indices, shorter_side)  # type: ignore[arg-type]

    def on(self, device: torch.device) -> CachedSplit:
        """Return the same split with its cache on `device`: this one, if its cache is there already."""
        if device == self._device:
            return self
        return CachedSplit(self.source, replace(self._plan, shared=False), device)

    def use(self) -> CacheUse:
        """Return the use since the last call."""
        images, self._images = self._images, 0
        hits, self._hits = self._hits, 0
        row_bytes = self._rows[0].nbytes if self._rows is not None and len(self._rows) else 0
        return CacheUse(images, hits, int(self._kept.sum(dtype=torch.int64)) * row_bytes)

    def __getstate__(self) -> dict[str, Any]:
        # A process that is no fork of this one makes a cache of its own, when it first needs it.
        alone = {"_plan": replace(self._plan, shared=False), "_rows": None, "_kept": self._kept[:0]}
        return self.__dict__ | alone | {"_images": 0, "_hits": 0}

    def _decoded(self, indices: Tensor) -> Tensor:
        """Return the decoded images of `indices`, on the cache's device."""
        device = self._device
        if self._rows is None:
            self._make(self._example())
        assert self._rows is not None
        room = len(self._rows)
        inside = indices < room
        there = inside & (self._kept[indices.clamp(max=max(0, room - 1))] == _KEPT) if room else inside
        hits = int(there.sum())
        self._images += len(indices)
        self._hits += hits
        if hits == len(indices):
            return self._rows.index_select(0, indices.to(device))
        fresh = self.source.decoded(indices[~there]).to(device)
        self._keep(indices[~there], fresh)
        if not hits:
            return fresh
        found = fresh.new_empty(len(indices), *fresh.shape[1:])
        found[there.to(device)] = self._rows.index_select(0, indices[there].to(device))
        found[~there.to(device)] = fresh
        return found

    def _example(self) -> Tensor:
        """Return the first image that can be read, (1, …)."""
        for first in torch.arange(len(self.source)).split(1):
            readable, decoded = read_readable(self.source.decoded, first)
            if len(readable):
                return decoded
        return self.source.decoded(torch.zeros(1, dtype=torch.int64))

    def _keep(self, indices: Tensor, decoded: Tensor) -> None:
        assert self._rows is not None
        fitting = indices < len(self._rows)
        places = indices[fitting]
        self._rows[places.to(self._rows.device)] = decoded[fitting.to(decoded.device)]
        self._kept[places] = _KEPT  # only now: another process may look at any time

    def _make(self, example: Tensor) -> None:
        """Allocate memory for images like `example`, (1, …)."""
        plan = self._plan
        limit = plan.limit.on(self._device) // (1 if plan.shared else plan.processes)
        room = min(len(self.source), limit // max(1, example.nbytes))
        shape = (room, *example.shape[1:])
        if plan.shared and room:
            self._kept = _common(room, torch.uint8)
            self._rows = _common(room * example[0].numel(), example.dtype).view(shape)
        else:
            self._kept = torch.zeros(room, dtype=torch.uint8)
            self._rows = torch.empty(shape, dtype=example.dtype, device=self._device)


def _common(numbers: int, dtype: torch.dtype) -> Tensor:
    """Return zeros shared with forked processes; pages are allocated when they are first written."""
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, numbers * dtype.itemsize, flags=flags), dtype=dtype)


def placed(split: Split, device: torch.device) -> Split:
    """Return a split with its cache, if it has one, on `device`."""
    if isinstance(split, WindowSplit):
        return split.over(placed(split.larger, device))
    return split.on(device) if isinstance(split, CachedSplit) else split


def use_of(split: Split) -> CacheUse | None:
    """Return the use of a split's cache since the last call; None if it has no cache."""
    if isinstance(split, WindowSplit):
        return use_of(split.larger)
    return split.use() if isinstance(split, CachedSplit) else None


def _inner(split: Any) -> Any:
    """Return the split below a view or cache; None: the split is neither."""
    if isinstance(split, WindowSplit):
        return split.larger
    if isinstance(split, CachedSplit):
        return split.source
    return split.whole_split if isinstance(split, Part) else None


def left_out_of(*splits: Split) -> list[str]:
    """Return the files of these splits that were left out since the last call, in one line each."""
    names: list[str] = []
    for split in splits:
        inner: Any = split
        while inner is not None:
            taken = getattr(inner, "newly_left_out", None)  # of a split that skips unreadable files
            names += taken() if taken else ()
            inner = _inner(inner)
    return list(map(printable, names))


class _DecodingPart(Part):
    """A part of a split that decodes images first, so that a cache can keep them; see `Decoding`."""

    whole_split: Any

    def decoded(self, indices: Tensor) -> Tensor:
        """Return the decoded images of `indices`."""
        return self.of_whole(self.whole_split.decoded, indices)

    def normalized(self, decoded: Tensor) -> Tensor:
        """Return (B, C, H, W) float32 in new memory, on the device of `decoded`."""
        found: Tensor = self.whole_split.normalized(decoded)
        return found


def part_of(split: Split, indices: Tensor) -> Split:
    """Return some images of a split, which has no cache yet, in the order of `indices`, (n,) int64."""
    if isinstance(split, WindowSplit):
        return split.over(part_of(split.larger, indices))
    return (_DecodingPart if isinstance(split, Decoding) else Part)(split, indices)

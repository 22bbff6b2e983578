"""How much memory a cache may take: a size, or a share of what is free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from polyrhythm.errors import RequestError

if TYPE_CHECKING:
    from typing import Self

AUTO, NONE = "auto", "none"
FREE_SHARE = 0.5
"""Of the memory that is free when a run starts, this much may be taken by what `auto` keeps."""

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
    """What all caches of one host, or of one GPU, may take together.

    Attributes:
        size_bytes: so much; None: a share of what is free when the cache is made.
    """

    size_bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `auto`, `none`, or a size such as `4GB`, `500 MB` or `1.5GiB`.

        Raises:
            RequestError: it is none of these.
        """
        wanted = text.strip().lower()
        if wanted in (AUTO, NONE):
            return cls(None if wanted == AUTO else 0)
        found = _SIZE.fullmatch(wanted)
        if found is None or found[2] not in _UNITS:
            raise RequestError(f"cache {text!r} is no size: give auto, none, or bytes such as 500MB or 4GB")
        return cls(int(float(found[1]) * _UNITS[found[2]]))

    def on(self, device: torch.device) -> int:
        """Gives the bytes for a device's memory."""
        if self.size_bytes is not None:
            return self.size_bytes
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_bytes()
        return int(free * FREE_SHARE)


def free_bytes(system: Path = Path("/")) -> int:
    """Gives the memory that this process could still take: what the host has, or its control group, if less.

    Args:
        system: the root of the file system, whose `proc` and `sys` say so. 0 where nobody does.
    """
    available = [left for names in _CGROUPS if (left := _left(system / "sys/fs/cgroup", *names)) is not None]
    try:
        lines = (system / "proc/meminfo").read_text().splitlines()
    except OSError:
        return min(available, default=0)
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return max(0, min([*found, *available], default=0))


def _left(folder: Path, limit: str, used: str) -> int | None:
    """Gives what is left of a control group's limit; None where there is none."""
    try:
        return int((folder / limit).read_text()) - int((folder / used).read_text())
    except (OSError, ValueError):  # no such file, or `max`
        return None

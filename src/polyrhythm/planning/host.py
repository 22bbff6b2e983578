"""What this host is: cores, memory, accelerators, and how fast its memory copies."""

from __future__ import annotations

import os
import socket
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from polyrhythm.launch.cores import available_cores

_COPIED_BYTES = 64 << 20
"""More than any cache holds, and little enough for the smallest machines."""

_REPEATS = 7


@dataclass(frozen=True)
class Host:
    """A host.

    Attributes:
        name: as the system knows it.
        cores: that this process may use.
        memory_bytes: of the whole machine.
        memory_bandwidth_bytes_per_s: that one thread copies, counting what it reads and what it writes.
        accelerators: names of its GPUs.
    """

    name: str
    cores: int
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    accelerators: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Gives its facts, JSON-able."""
        return {**vars(self), "accelerators": list(self.accelerators)}


def measure_host() -> Host:
    """Measures the host that this runs on; takes about a tenth of a second."""
    count = torch.cuda.device_count()
    return Host(
        socket.gethostname(),
        available_cores(),
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        _copy_speed(),
        tuple(torch.cuda.get_device_name(index) for index in range(count)),
    )


def _copy_speed() -> float:
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)  # touched, so that the system's handing out of pages is not measured
    seconds = []
    for _ in range(_REPEATS):
        started_at = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started_at)
    return 2 * _COPIED_BYTES / statistics.median(seconds)

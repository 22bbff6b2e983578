"""The memory of this process: what there is, and the most that it has taken.

On a GPU it is what torch's allocator hands out. On the CPU it is what of the process is resident beyond what was so at
first, so that the interpreter and what a forked process has from its parent do not count, nor do files and what it
shares with others.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_RESET_PEAK = "5"


def memory_of(device: torch.device) -> int:
    """Return the bytes that a device has, or that the machine allows; of all processes together."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in _LIMITS:
        try:
            text = limit.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdecimal():  # else there is none
            whole = min(whole, int(text))
    return whole


def return_freed() -> None:
    """Give memory that this process has freed back to the system, where the C library can: small pieces it keeps."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_BLOCK_BYTES = 1 << 20


def return_blocks() -> None:
    """Have the C library return each larger block as soon as it is freed, where it can.

    Freed blocks that it keeps are between used ones, and are no use to larger ones: up to 2.3 times the used
    memory was resident. But returned pages are cleared first, which takes a third of the time of a small
    network's step.
    """
    choose = getattr(ctypes.CDLL(None), "mallopt", None)
    if choose is not None:
        choose(_MMAP_THRESHOLD, _BLOCK_BYTES)
        choose(_TRIM_THRESHOLD, _BLOCK_BYTES)


def peak_memory(device: torch.device) -> Callable[[], int]:
    """Begin to measure the most memory that this process takes on a device.

    Returns:
        Function that returns the peak of bytes since now, beyond those of now; 0 where the system does not
        report it.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        return lambda: int(torch.cuda.max_memory_allocated(device)) - before
    with suppress(OSError):  # not everywhere may a process reset it
        _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
    before = _resident("RssAnon")

    def taken() -> int:
        # The system keeps the peak of all pages; those of files, as of torch itself, only become more.
        others = _resident("RssFile") + _resident("RssShmem")
        return max(0, _resident("VmHWM") - others - before)

    return taken


def _resident(key: str) -> int:
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)

"""Energy of this host: its processors, where the kernel reports it (RAPL), and its GPUs, by NVML.

    intel-rapl:0/     name: package-0      energy_uj: 1234567      max_energy_range_uj: 262143328850
    intel-rapl:0:0/   name: core           in the package's
    intel-rapl:0:1/   name: dram           not in it

Counters are microjoules since some moment, and begin again at 0 beyond their range: at 100 W after some 40 minutes, so
they must be looked at more often. AMD's processors have the same files (`/sys/class/powercap`). Mostly only root may
read them. NVML, a library of the driver, counts millijoules of a GPU since the driver was loaded, from Volta on.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"


class EnergyCounter:
    """Adds up what all packages and their memory take, and all GPUs.

    Args:
        root: folder in which the kernel lists processors.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self._nvml, self._gpus = _gpus()
        self._domains: dict[Path, tuple[int, int]] = {}  # the latest reading, and the range, in microjoules
        self._sum_uj = 0
        for folder in sorted(root.glob("*rapl:*")):
            try:
                name = (folder / "name").read_text(encoding="ascii").strip()
                if name.startswith("package") or name == "dram":
                    counted = int((folder / "max_energy_range_uj").read_text(encoding="ascii"))
                    self._domains[folder] = _reading(folder), counted
            except (OSError, ValueError):
                continue

    @property
    def joules(self) -> float | None:
        """Joules of the processors since this object was made, up to the latest `look`; None if not available."""
        return self._sum_uj / 1e6 if self._domains else None

    @property
    def gpu_joules(self) -> float | None:
        """Joules of all GPUs since this object was made, up to now; None if not available."""
        taken = [
            now - before for gpu, before in self._gpus if (now := _taken_mj(self._nvml, gpu)) is not None
        ]
        return sum(taken) / 1e3 if taken else None

    def look(self) -> None:
        """Read the counters; a domain that becomes unreadable is ignored from then on."""
        for folder, (before, counted) in list(self._domains.items()):
            try:
                now = _reading(folder)
            except (OSError, ValueError):
                continue
            self._sum_uj += now - before if now >= before else now + counted - before
            self._domains[folder] = now, counted


def _reading(folder: Path) -> int:
    return int((folder / "energy_uj").read_text(encoding="ascii"))


def _library() -> Any:
    """Return NVML; None where there is no driver.

    Its functions return 0 where they succeed.
    """
    try:
        return ctypes.CDLL(NVML)
    except OSError:
        return None


def _gpus() -> tuple[Any, list[tuple[ctypes.c_void_p, int]]]:
    """Return NVML, and the handle and the millijoules so far of each GPU that counts them."""
    nvml, count = _library(), ctypes.c_uint()
    if nvml is None or nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None, []
    found = []
    for index in range(count.value):
        gpu = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(gpu)) == 0:
            taken = _taken_mj(nvml, gpu)
            if taken is not None:
                found.append((gpu, taken))
    return nvml, found


def _taken_mj(nvml: Any, gpu: ctypes.c_void_p) -> int | None:
    """Return the millijoules that a GPU has counted; None for one before Volta, or one that has failed."""
    taken = ctypes.c_ulonglong()
    return None if nvml.nvmlDeviceGetTotalEnergyConsumption(gpu, ctypes.byref(taken)) else taken.value

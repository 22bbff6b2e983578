"""The energy of processors, on imitated trees of the kernel's files."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from polyrhythm.launch import energy
from polyrhythm.launch.energy import EnergyCounter


def domain(root: Path, folder: str, name: str, energy_uj: int, counted: int = 1000) -> Path:
    made = root / folder
    made.mkdir(parents=True)
    (made / "name").write_text(f"{name}\n")
    (made / "energy_uj").write_text(f"{energy_uj}\n")
    (made / "max_energy_range_uj").write_text(f"{counted}\n")
    return made / "energy_uj"


def test_packages_and_memory_are_added_up_and_parts_of_packages_are_not(tmp_path: Path) -> None:
    first = domain(tmp_path, "intel-rapl:0", "package-0", 100)
    second = domain(tmp_path, "intel-rapl:1", "package-1", 900)
    memory = domain(tmp_path, "intel-rapl:0:1", "dram", 5)
    core = domain(tmp_path, "intel-rapl:0:0", "core", 50)
    everything = domain(tmp_path, "intel-rapl:2", "psys", 50)
    (tmp_path / "intel-rapl").mkdir()
    counter = EnergyCounter(tmp_path)
    assert counter.joules == 0
    for file, value in ((first, 400), (second, 100), (memory, 25), (core, 999), (everything, 999)):
        file.write_text(f"{value}\n")
    counter.look()
    assert counter.joules == pytest.approx((300 + 200 + 20) / 1e6)  # the second began again at 0, beyond 1000
    first.write_text("500\n")
    second.unlink()
    counter.look()
    assert counter.joules == pytest.approx((300 + 200 + 20 + 100) / 1e6)


def test_where_nobody_tells_nothing_is_known(tmp_path: Path) -> None:
    assert EnergyCounter(tmp_path / "none").joules is None
    domain(tmp_path, "intel-rapl:0", "package-0", 100).write_text("not a number")
    counter = EnergyCounter(tmp_path)
    counter.look()
    assert counter.joules is None


class ImitatedNvml:
    """A library as the driver has it, whose GPUs have counted so many millijoules; None: one that cannot count."""

    def __init__(self, counters: dict[int, int | None], status: int = 0) -> None:
        self.counters = counters
        self.status = status

    def nvmlInit_v2(self) -> int:
        return self.status

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.counters)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: Any) -> int:
        handle._obj.value = 0x1000 + index.value
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: ctypes.c_void_p, taken: Any) -> int:
        counted = self.counters[(handle.value or 0) - 0x1000]
        if counted is None:
            return 3  # not supported
        taken._obj.value = counted
        return 0


def test_gpus_are_added_up_from_where_they_stood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = 1 << 40  # more than 32 bits, as of a driver that was loaded weeks ago
    counters: dict[int, int | None] = {0: 5_000, 1: many, 2: None}
    monkeypatch.setattr(energy, "_library", lambda: ImitatedNvml(counters))
    counter = EnergyCounter(tmp_path)
    counters |= {0: 6_500, 1: many + 250}
    assert counter.gpu_joules == pytest.approx(1.75)
    counters[1] = None  # it has fallen off the bus
    assert counter.gpu_joules == pytest.approx(1.5)
    assert counter.joules is None


def test_without_a_driver_or_the_library_gpus_tell_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        energy, "_library", lambda: ImitatedNvml({0: 1}, status=9)
    )  # the driver is not loaded
    assert EnergyCounter(tmp_path).gpu_joules is None
    monkeypatch.undo()
    monkeypatch.setattr(energy, "NVML", "libnvidia-of-no-machine.so.1")
    assert EnergyCounter(tmp_path).gpu_joules is None

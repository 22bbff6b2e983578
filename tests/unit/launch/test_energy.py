"""The energy of processors, on imitated trees of the kernel's files."""

from __future__ import annotations

from pathlib import Path

import pytest

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

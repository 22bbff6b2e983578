"""Real runs tell the energy of their host; simulated ones, whose seconds are virtual, do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyrhythm.api import train as training
from polyrhythm.api.simulate import simulate
from polyrhythm.events import Event, RunStarted
from polyrhythm.launch.energy import EnergyCounter

JOB: dict[str, Any] = {"data": "digits", "model": "mlp", "workers": 1, "epochs": 1, "strategy": "synchronous"}


class Heater:
    """Lets the counter go on when training starts."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_event(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.file.write_text("7200000\n")

    def close(self) -> None:
        pass


def test_a_real_run_tells_what_its_host_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "powercap/intel-rapl:0"
    package.mkdir(parents=True)
    for name, text in (("name", "package-0"), ("energy_uj", "0"), ("max_energy_range_uj", "10000000")):
        (package / name).write_text(f"{text}\n")
    monkeypatch.setattr(training, "EnergyCounter", lambda: EnergyCounter(tmp_path / "powercap"))
    heater = Heater(package / "energy_uj")
    run = training.train(**JOB, out=tmp_path / "run", observers=[heater], start_method="fork")
    assert run is not None
    assert run.figures["energy_j"] == pytest.approx(7.2)
    assert "0.002 Wh (7 J)" in (tmp_path / "run/report.html").read_text()
    virtual = simulate(**JOB, cluster="office", out=tmp_path / "simulated")
    assert "energy_j" not in virtual.figures

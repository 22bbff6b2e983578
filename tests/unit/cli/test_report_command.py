"""`report` writes what a killed run could not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from polyrhythm.cli.main import _status
from polyrhythm.events import RunStarted
from polyrhythm.reporting.event_log import EventLog


def test_a_killed_run_gets_its_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.on_event(
        RunStarted(
            time_s=0, strategy="s", data="d", model="m", workers=1, servers=0, epochs=1, steps_per_epoch=1
        )
    )
    log.close()
    assert _status(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"reports": [str(tmp_path / "report.html")]}
    assert "This run has not ended, or was killed" in (tmp_path / "report.html").read_text()


def test_what_is_no_run_is_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    assert refused("report", "nowhere") == "nowhere is not the folder of a run"
    assert "give the folder of a run" in refused("report", tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "plan.yaml").write_text("{}")
    assert "is a comparison and has its report: --plots png" in refused("report", tmp_path)

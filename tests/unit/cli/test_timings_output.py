"""What `--timings` prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyrhythm.cli.main import _status


def test_a_dry_run_prints_the_table_and_its_json_holds_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "simulate",
        "--cluster",
        "ut_austin",
        "--gradients",
        "none",
        "--steps",
        "4",
        "--data",
        "digits",
    ]
    arguments += ["--model", "mlp", "--workers", "3", "--step-time", "constant(seconds=0.3)"]
    assert _status([*arguments, "--timings", "--out", str(tmp_path / "table")]) == 0
    lines = capfd.readouterr().out.splitlines()
    first = lines.index("Where a step's time goes, in milliseconds")
    assert lines[first + 1].split() == [
        *(
            "worker",
            "steps",
            "step",
            "data",
            "forward",
            "backward",
            "update",
            "communication",
            "waiting",
            "other",
        )
    ]
    rows = [line.split() for line in lines[first + 2 : first + 7]]
    assert [row[0] for row in rows] == ["0", "1", "2", "all", "share"]
    assert [(row[1], row[4], row[5]) for row in rows[:3]] == [("4", "100.00", "200.00")] * 3

    assert _status([*arguments, "--timings", "--json", "--out", str(tmp_path / "json")]) == 0
    workers = json.loads(capfd.readouterr().out)["timings"]["workers"]
    assert [worker["forward_s"] for worker in workers] == pytest.approx([0.4] * 3)
    assert _status([*arguments, "--json", "--out", str(tmp_path / "off")]) == 0
    assert "timings" not in json.loads(capfd.readouterr().out)

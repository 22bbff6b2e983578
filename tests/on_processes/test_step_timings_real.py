"""Where real steps go: whatever they take, the parts, the trace and the events tell of the same seconds."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from on_processes.commands import shell
from polyrhythm.events import WorkerTimings
from polyrhythm.reporting.event_log import read_events
from polyrhythm.reporting.timings import PARTS

COMMAND = [
    "train",
    "--data",
    "digits",
    "--model",
    "mlp",
    "--workers",
    "2",
    "--epochs",
    "1",
    "--timings",
    "--out",
    "run",
    "--json",
]
COMMUNICATION = "communication: "


def laps_of(records: list[dict[str, Any]], worker: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    spans = [record for record in records if record["ph"] == "X" and record["tid"] == worker]
    spans.sort(key=lambda span: (span["ts"], -span["dur"]))
    blocked = [span for span in spans if span["name"].startswith(COMMUNICATION)]
    return [span for span in spans if span not in blocked], blocked


def test_parts_add_up_to_steps_and_the_trace_shows_them(tmp_path: Path) -> None:
    (done,) = shell(tmp_path, COMMAND)
    figures = done.figures
    steps, workers = figures["steps"], figures["timings"]["workers"]
    assert [(entry["worker"], entry["steps"]) for entry in workers] == [(0, steps), (1, steps)]
    assert figures["timings"]["tells_waiting"]

    events = [
        event for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, WorkerTimings)
    ]
    records = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    for entry in workers:
        assert entry["seconds"] == pytest.approx(sum(entry[f"{part}_s"] for part in PARTS))
        assert 0 < entry["seconds"] <= figures["seconds"]
        assert all(entry[f"{part}_s"] >= 0 for part in PARTS)
        assert min(entry["forward_s"], entry["backward_s"], entry["update_s"], entry["communication_s"]) > 0
        mine = [event for event in events if event.worker == entry["worker"]]
        still_s = entry["communication_s"] + entry["waiting_s"]
        assert still_s == pytest.approx(sum(seconds for event in mine for _, seconds in event.communication))

        laps, blocked = laps_of(records, entry["worker"])
        assert [lap["name"] for lap in laps] == ["data", "forward", "backward", "update", "other"] * steps
        for before, after in pairwise(laps):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
        assert sum(lap["dur"] for lap in laps) / 1e6 == pytest.approx(entry["seconds"])
        assert sum(span["dur"] for span in blocked) / 1e6 == pytest.approx(still_s)
        for part in ("data", "forward", "backward", "update", "other"):
            own = [lap for lap in laps if lap["name"] == part]
            inside = [
                span["dur"]
                for lap in own
                for span in blocked
                if lap["ts"] <= span["ts"] < lap["ts"] + lap["dur"]
            ]
            own_s = (sum(lap["dur"] for lap in own) - sum(inside)) / 1e6
            assert own_s == pytest.approx(entry[f"{part}_s"], abs=1e-6)

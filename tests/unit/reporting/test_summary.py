"""The summary of a run that is kept beside its log: that it says what the log says, and when it counts for nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyrhythm.errors import RequestError
from polyrhythm.events import Evaluated, Notice, RunEnded, RunStarted, WorkerProgress
from polyrhythm.reporting import summary
from polyrhythm.reporting.event_log import EventLog
from polyrhythm.reporting.pages.report import write_report
from polyrhythm.reporting.summary import SUMMARY_FILE, read_summary

STARTED = RunStarted(
    time_s=0.0, strategy="easgd", data="d", model="m", workers=2, servers=1, epochs=1, steps_per_epoch=600
)


def worked(step: int, worker: int) -> WorkerProgress:
    return WorkerProgress(
        time_s=step / 10,
        worker=worker,
        epoch=0,
        step=step,
        steps=1,
        images=8,
        loss=600.0 - step,
        learning_rate=0.1,
    )


def made(folder: Path, steps: int = 600) -> Path:
    folder.mkdir()
    log = EventLog(folder / "events.jsonl")
    for event in (STARTED, *(worked(step, worker) for step in range(1, steps + 1) for worker in (0, 1))):
        log.on_event(event)
    log.on_event(Evaluated(time_s=61.0, epoch=1, test_loss=0.25, test_top1=0.75, test_top5=1.0))
    log.on_event(RunEnded(time_s=62.0, outcome="done", result={"test_top1": 0.75, "price": None}))
    log.close()
    return folder


def test_a_run_is_read_from_its_summary_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,200 reports of two workers become points of six reports each, whose losses are their means."""
    folder = made(tmp_path / "run")
    from_log = read_summary(folder)
    assert (from_log.outcome, from_log.known["test_top1"], from_log.known["price"]) == ("done", 0.75, None)
    assert [(test.images, test.event.test_top1) for test in from_log.tests] == [(9600, 0.75)]
    assert len(from_log.losses) == 200
    assert from_log.losses[0] == (0.3, 48, 598.0)  # steps 1, 2 and 3 of both
    write_report(folder)
    monkeypatch.setattr(summary, "read_events", None)
    assert read_summary(folder) == from_log


def test_a_summary_of_another_log_counts_for_nothing(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    write_report(folder)
    log = EventLog(folder / "events.jsonl")
    log.on_event(Notice(time_s=63.0, text="it goes on"))
    log.close()
    assert read_summary(folder).outcome == "done"
    changed = json.loads((folder / SUMMARY_FILE).read_text()) | {"outcome": "forged"}
    (folder / SUMMARY_FILE).write_text(json.dumps(changed))
    assert read_summary(folder).outcome == "done"
    for content in ("", "[1]", "{}"):
        (folder / SUMMARY_FILE).write_text(content)
        assert read_summary(folder).outcome == "done"
    (folder / "events.jsonl").unlink()
    with pytest.raises(RequestError, match="give the folder of a run"):
        read_summary(folder)

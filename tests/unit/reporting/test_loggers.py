"""One protocol for other tools that keep track of runs: what they are told, and in which order."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from polyrhythm.errors import RequestError
from polyrhythm.events import Evaluated, Event, Logged, RunEnded, RunStarted, ServerProgress, WorkerProgress
from polyrhythm.reporting.loggers import LoggedRun, MLflowLogger, WandbLogger

STARTED = RunStarted(
    time_s=0,
    strategy="downpour",
    data="digits",
    model="mlp",
    workers=2,
    servers=1,
    epochs=3,
    steps_per_epoch=4,
)


class Notes:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def begin(self, options: Mapping[str, Any]) -> None:
        self.calls.append(("begin", options["strategy"], options["workers"], "begun" in options))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.calls.append(("log", step, dict(scalars)))

    def end(self, outcome: str, figures: Mapping[str, Any]) -> None:
        self.calls.append(("end", outcome, dict(figures)))


def progress(worker: int, loss: float) -> WorkerProgress:
    return WorkerProgress(
        time_s=2.0,
        worker=worker,
        epoch=0,
        step=4,
        steps=4,
        images=32,
        loss=loss,
        learning_rate=0.5,
        wait_s=0.5,
    )


def told(*events: Event) -> list[tuple[Any, ...]]:
    notes = Notes()
    run = LoggedRun(notes)
    for event in events:
        run.on_event(event)
    run.close()
    run.close()
    return notes.calls


def test_a_logger_is_told_a_run_by_the_images_seen() -> None:
    calls = told(
        STARTED,
        progress(0, 1.5),
        progress(1, math.nan),
        ServerProgress(time_s=2.0, server=0, version=8, staleness={0: 1, 2: 1}),
        Logged(time_s=2.1, worker=0, step=4, values={"norm": 3.0}),
        Evaluated(time_s=3.0, epoch=1, test_loss=0.5, test_top1=0.75, test_top5=math.nan),
        RunEnded(time_s=4.0, outcome="done", result={"steps": 8}),
    )
    rates = {"learning_rate/worker_0": 0.5, "images_per_s/worker_0": 16.0, "waiting_share/worker_0": 0.25}
    assert calls[:2] == [("begin", "downpour", 2, False), ("log", 32, {"loss/worker_0": 1.5, **rates})]
    assert "loss/worker_1" not in calls[2][2]
    assert calls[3:] == [
        ("log", 64, {"staleness/server_0": 1.0}),
        ("log", 64, {"norm": 3.0}),
        ("log", 64, {"test_loss": 0.5, "test_top1": 0.75}),
        ("end", "done", {"steps": 8}),
    ]


def test_a_run_that_is_killed_has_failed_and_one_that_is_resumed_begins_once() -> None:
    assert told(STARTED, STARTED) == [("begin", "downpour", 2, False), ("end", "failed", {})]
    assert told(RunEnded(time_s=0.0, outcome="done", result={})) == []


@pytest.mark.parametrize(("kind", "module"), [(MLflowLogger, "mlflow.tracking"), (WandbLogger, "wandb")])
def test_a_tool_that_is_not_installed_is_named(
    kind: Any, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RequestError, match="is not installed: pip install"):
        kind()

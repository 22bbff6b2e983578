"""`join(report=…)` leaves what `train` leaves: events, where the time went, TensorBoard files and a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from polyrhythm.api.join import Group, join
from polyrhythm.api.loop.loop_report import images_in
from polyrhythm.errors import RequestError
from polyrhythm.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    Logged,
    RunEnded,
    RunStarted,
    WorkerProgress,
    WorkerTimings,
)
from polyrhythm.reporting.event_log import read_events
from unit.api.loop.threads import run_in_threads

IMAGES, BATCH_SIZE, EPOCHS = 40, 4, 2


def loop(group: Group, folder: Path | None = None, *, fails: bool = False, resumes: bool = False) -> None:
    torch.manual_seed(0)
    network = nn.Linear(3, 2)
    data = TensorDataset(torch.randn(IMAGES, 3), torch.arange(IMAGES) % 2)
    with group:
        model, optimizer = group.distribute(network, torch.optim.SGD(network.parameters(), lr=0.5))
        shard = group.shard(DataLoader(data, BATCH_SIZE, shuffle=True))
        if resumes and folder is not None:
            group.load(folder)
        for epoch in group.epochs(EPOCHS + resumes):
            for x, y in shard:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                group.log(loss=loss, norm=1.5)
                if fails and epoch == 1:
                    raise ValueError("the disk\nhas gone")
            if group.leads:
                group.log(test_top1=0.5, test_loss=0.7)
            if folder is not None:
                group.save(folder)


def of(kind: type[Event], events: list[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


@pytest.mark.parametrize("strategy", ["synchronous", "parameter_server"])
def test_a_loop_leaves_what_training_leaves(strategy: str, tmp_path: Path) -> None:
    report, saved = tmp_path / "run", tmp_path / "saved"
    run_in_threads(strategy, 2, lambda group: loop(group, saved), report=report)
    events = read_events(report / "events.jsonl")
    (started,) = of(RunStarted, events)
    assert (started.strategy, started.model, started.data) == (strategy, "Linear", "TensorDataset")
    assert (started.workers, started.epochs, started.steps_per_epoch) == (
        2,
        EPOCHS,
        IMAGES // 2 // BATCH_SIZE,
    )
    told = of(WorkerProgress, events)
    assert sum(each.images for each in told) == EPOCHS * IMAGES
    assert {each.worker for each in told} == {0, 1}
    assert all(0 < each.loss < 2 and each.learning_rate == 0.5 for each in told)
    timed = of(WorkerTimings, events)
    assert sum(each.steps for each in timed) == 2 * EPOCHS * started.steps_per_epoch
    assert all(min(each.data_s, each.forward_s, each.backward_s, each.update_s) > 0 for each in timed)
    assert [each.epoch for each in of(CheckpointSaved, events)] == [1, 2]
    assert [(each.epoch, each.test_top1) for each in of(Evaluated, events)] == [(1, 0.5), (2, 0.5)]
    assert {name for each in of(Logged, events) for name in each.values} == {"norm"}
    end = events[-1]
    assert isinstance(end, RunEnded)
    assert end.outcome == "done"
    assert end.result["steps"] == EPOCHS * started.steps_per_epoch
    assert end.result["staleness"]["histogram"]
    page = (report / "report.html").read_text()
    assert "Linear on TensorDataset" in page
    assert "has not ended" not in page
    assert list((report / "tensorboard").glob("events.out.tfevents.*"))
    assert json.loads((report / "environment.json").read_text())["torch"] == torch.__version__

    run_in_threads(strategy, 2, lambda group: loop(group, saved, resumes=True), report=report)
    again = read_events(report / "events.jsonl")
    second = of(RunStarted, again)[1]
    assert (second.start_epoch, second.start_step) == (2, EPOCHS * started.steps_per_epoch)
    assert len(of(RunEnded, again)) == 2


def test_a_loop_that_fails_is_reported_as_failed(tmp_path: Path) -> None:
    report = tmp_path / "run"
    with pytest.raises(ValueError, match="the disk\nhas gone"):
        run_in_threads("synchronous", 1, lambda group: loop(group, fails=True), report=report)
    end = read_events(report / "events.jsonl")[-1]
    assert isinstance(end, RunEnded)
    assert (end.outcome, end.result) == ("failed", {"error": "ValueError: the disk has gone"})
    assert "This run failed" in (report / "report.html").read_text()


def test_a_folder_of_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "POLYRHYTHM_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "letter.txt").write_text("dear run")
    with pytest.raises(RequestError, match="holds no run: name another for the report"):
        join(report=tmp_path)
    with pytest.raises(RequestError, match="observers receive the events of a report"):
        join(observers=[object()])  # type: ignore[list-item]
    report = tmp_path / "run"
    run_in_threads("synchronous", 1, loop, report=report)
    with pytest.raises(RequestError, match="already holds another run: name another folder for the report"):
        run_in_threads("synchronous", 1, loop, report=report)


def test_pictures_of_any_batch_are_counted() -> None:
    assert images_in((torch.zeros(5, 2), torch.zeros(5))) == 5
    assert images_in({"index": 3, "pixels": torch.zeros(4, 3, 2)}) == 4
    assert images_in([("a", "b"), [torch.zeros(7)]]) == 7
    assert images_in("nothing") == 0

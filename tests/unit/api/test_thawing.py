"""Two phases of training: which runs they are, and what they are told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyrhythm.api.train import staged_finetuning
from polyrhythm.config.recipe import configure
from polyrhythm.errors import RequestError
from polyrhythm.events import RunEnded
from polyrhythm.reporting.event_log import Observer


class _Trainer:
    """Notes what it is asked to train."""

    def __init__(self, outcome: str = "done") -> None:
        self.asked: list[dict[str, Any]] = []
        self.outcome = outcome

    def __call__(self, **options: Any) -> Any:
        self.asked.append(options)
        for observer in options["observers"]:
            observer.on_event("event")
            observer.close()
        return SimpleNamespace(outcome=self.outcome, folder=options["out"])


class _Watcher:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_event(self, event: Any) -> None:
        self.seen.append(event)

    def close(self) -> None:
        self.seen.append("closed")


def test_the_second_run_starts_from_the_first_with_norms_frozen_only() -> None:
    trainer, watcher = _Trainer(), _Watcher()
    config = configure({"freeze": "body", "freeze_epochs": 2, "weights": "old", "batch_size": 16})
    run = staged_finetuning(trainer, config, 5, Path("runs/x"), observers=[watcher], start_method="fork")
    first, second = trainer.asked
    assert (first["out"], first["freeze"], first["epochs"], first["weights"]) == (
        Path("runs/x-frozen"),
        "body",
        2,
        "old",
    )
    assert (second["out"], second["freeze"], second["epochs"], second["weights"]) == (
        Path("runs/x"),
        "norms",
        3,
        "runs/x-frozen",
    )
    for options in (first, second):
        assert options["freeze_epochs"] is None
        assert (options["batch_size"], options["start_method"]) == (16, "fork")
    assert run is not None
    assert run.folder == Path("runs/x")
    assert watcher.seen == ["event", "event", "closed"]


@pytest.mark.parametrize("outcome", ["interrupted", "failed"])
def test_observers_hear_the_end_of_a_first_run_that_is_the_last(outcome: str) -> None:
    watcher = _Watcher()

    def trainer(*, observers: Sequence[Observer], out: Path, **_: Any) -> Any:
        for observer in observers:
            observer.on_event(RunEnded(time_s=1.0, outcome=outcome, result={}))
            observer.close()
        return SimpleNamespace(outcome=outcome, folder=out)

    config = configure({"freeze": "body", "freeze_epochs": 2})
    staged_finetuning(trainer, config, 5, Path("x"), observers=[watcher], start_method="fork")
    assert [type(each).__name__ for each in watcher.seen] == ["RunEnded", "str"]


def test_an_interrupted_first_run_is_the_last() -> None:
    trainer = _Trainer("interrupted")
    config = configure({"freeze": "body", "freeze_epochs": 2})
    run = staged_finetuning(trainer, config, 5, Path("x"), observers=[], start_method="fork")
    assert run is not None
    assert run.folder == Path("x-frozen")
    assert len(trainer.asked) == 1


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"freeze_epochs": 2}, "is a duration, and nothing is frozen"),
        ({"freeze": "body", "freeze_epochs": 5}, "leaves none of 5 epochs"),
    ],
)
def test_phases_that_cannot_be_are_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        staged_finetuning(_Trainer(), configure(values), 5, Path("x"), observers=[], start_method="fork")


def test_under_torchrun_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyrhythm.api.train.started_by_torchrun", lambda: True)
    config = configure({"freeze": "body", "freeze_epochs": 2})
    with pytest.raises(RequestError, match="two runs"):
        staged_finetuning(_Trainer(), config, 5, Path("x"), observers=[], start_method="fork")

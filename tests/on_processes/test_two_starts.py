"""Two starts of one run at once, as where a host is cut off and comes back: the later one has the folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from on_processes.commands import Started, wait_for
from on_processes.runs import ending
from on_processes.verb import POLYRHYTHM
from polyrhythm.claim import is_staging
from polyrhythm.events import CheckpointSaved, Event, RunEnded, RunStarted
from polyrhythm.reporting.event_log import read_events
from polyrhythm.training.checkpoint import checkpoints, load_checkpoint

TRAIN = [
    *(POLYRHYTHM, "train", "--data", "digits", "--model", "mlp", "--threads", "1", "--batch-size", "8"),
    *("--epochs", "100000", "--silence-s", "600", "--out", "run", "--resume", "auto"),
]


@pytest.fixture
def starts(tmp_path: Path) -> Iterator[list[Started]]:
    """Starts of the run, which are ended."""
    with ending() as begun:
        yield begun


def test_a_start_that_comes_back_finds_a_later_one_and_ends(starts: list[Started], tmp_path: Path) -> None:
    def begin(name: str) -> Started:
        starts.append(Started(TRAIN, tmp_path, tmp_path / name))
        starts[-1].run = tmp_path / "run"
        return starts[-1]

    def saved_by(start: int) -> bool:
        found = told()[begins()[start] :] if len(begins()) > start else []
        return any(isinstance(event, CheckpointSaved) for event in found)

    def told() -> list[Event]:
        log = tmp_path / "run" / "events.jsonl"
        return read_events(log) if log.exists() else []

    def begins() -> list[int]:
        return [place for place, event in enumerate(told()) if isinstance(event, RunStarted)]

    former = begin("former")
    former.wait_for(lambda event: isinstance(event, CheckpointSaved))
    os.killpg(former.process.pid, signal.SIGSTOP)
    later = begin("later")
    wait_for(lambda: saved_by(1), "a checkpoint of the later start")
    os.killpg(former.process.pid, signal.SIGCONT)
    left = former.result()
    assert left.status == 1
    assert left.complaint.removeprefix("worker 0 (rank 0): ") == (
        "run belongs to a later start of this run by now, so this one ends"
    )
    seen = len(told())
    wait_for(
        lambda: any(isinstance(event, CheckpointSaved) for event in told()[seen:]), "it to save another one"
    )
    later.process.terminate()
    assert later.result().status == 130
    events = told()
    assert len(begins()) == 2
    assert [event.outcome for event in events if isinstance(event, RunEnded)] == ["interrupted"]
    steps = [event.step for event in events[begins()[1] :] if isinstance(event, CheckpointSaved)]
    assert steps == sorted(steps)
    newest, *_ = checkpoints(tmp_path / "run" / "checkpoints")
    assert load_checkpoint(newest)[1]["step"] == steps[-1]
    assert not [path for path in (tmp_path / "run").rglob("*") if is_staging(path)]

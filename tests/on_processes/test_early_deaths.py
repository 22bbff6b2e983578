"""Worker 0 dies before training has begun, or while the run is being stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from conformance.jobs import perceptron
from on_processes.commands import wait_for
from on_processes.faults.play import job_of
from on_processes.runs import Starter, runs
from polyrhythm.events import CheckpointSaved, Event, Restarted, RunEnded, RunStarted, WorkerProgress
from polyrhythm.launch.children import Emit, RankLost, run_local, run_restarting
from polyrhythm.reporting.event_log import read_events
from polyrhythm.roles.job import Job
from processes.family import is_pending, stop


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    options = (
        "--data",
        "digits",
        "--model",
        "mlp",
        "--threads",
        "1",
        "--epochs",
        "100000",
        "--silence-s",
        "60",
    )
    with runs(tmp_path, "train", *options) as starter:
        yield starter


def mortal(lives: Path, deaths: int) -> nn.Module:
    """Makes a model, if this is not worker 0, or it has died so many times before; else it dies now."""
    if multiprocessing.current_process().name.endswith("rank 0") and len(list(lives.iterdir())) < deaths:
        (lives / str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return perceptron()


def played(deaths: int, restarts: int, folder: Path) -> list[Event]:
    lives = folder / "lives"
    lives.mkdir()
    job = replace(
        job_of("synchronous", folder / "run", restarts, epochs=2),
        make_model=lambda: mortal(lives, deaths),
    )
    events: list[Event] = []

    def play(session: Job, emit: Emit) -> bool:
        return run_local(session, emit, threads=1)

    run_restarting(job, play, events.append, restarts)
    return events


def test_before_training_has_begun_the_run_is_started_again(tmp_path: Path) -> None:
    again, *others = played(deaths=1, restarts=1, folder=tmp_path)
    assert isinstance(again, Restarted)
    assert again.text == (
        "worker 0 (rank 0) was killed by SIGKILL; the run is started again (restart 1 of 1) from the beginning, since "
        "there is no checkpoint yet: 0 updates since then are lost"
    )
    assert sum(isinstance(event, RunStarted) for event in others) == 1
    end = others[-1]
    assert isinstance(end, RunEnded)
    assert (end.outcome, end.result["workers_lost"]) == ("done", 0)


def test_without_a_restart_left_it_ends_and_names_the_cause(tmp_path: Path) -> None:
    with pytest.raises(
        RankLost, match=r"^worker 0 \(rank 0\) was killed by SIGKILL; continue with --resume .*run$"
    ):
        played(deaths=2, restarts=1, folder=tmp_path)


@pytest.mark.parametrize("strategy", ["synchronous", "parameter_server"])
def test_while_the_run_is_being_stopped_it_ends_and_names_the_cause(strategy: str, start: Starter) -> None:
    command = start("--strategy", strategy)
    command.wait_for(lambda event: isinstance(event, CheckpointSaved))
    leader, other, *_ = command.children()
    stop(other)  # so that worker 0 has somebody to wait for
    command.process.terminate()
    wait_for(lambda: is_pending(other, signal.SIGTERM), "the launcher to tell all")
    os.kill(leader, signal.SIGKILL)
    os.kill(other, signal.SIGCONT)
    result = command.result()
    assert result.status == 1
    assert result.complaint == "worker 0 (rank 0) was killed by SIGKILL; continue with --resume run"
    *_, end = read_events(command.run / "events.jsonl")
    assert isinstance(end, RunEnded)
    assert end.outcome == "failed"
    again = start("--strategy", strategy, "--resume", "auto")
    resumed = again.wait_for(lambda event: isinstance(event, RunStarted) and event.start_epoch > 0)
    again.wait_for(
        lambda event: isinstance(event, WorkerProgress) and event.step > resumed.to_json()["start_step"]
    )

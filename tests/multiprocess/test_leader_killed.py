"""Worker 0 of workers that go in step is killed, again and again: real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.jobs import result_of, simulated
from multiprocess.faults.killing import PAUSE_S
from multiprocess.faults.play import Paced, Stage, job_of, nothing, of, played, send, steps_of
from multiprocess.runs import Starter, runs
from polyrhythm.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    Notice,
    Restarted,
    RunEnded,
    RunStarted,
    WorkerJoined,
    WorkerLost,
    WorkerProgress,
)
from polyrhythm.roles.job import Job, Keeping

EPOCHS, LENGTH = 6, 20
"""Of 240 images in batches of four, each of three workers takes twenty steps an epoch."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    batches = ("--batch-size", "8", "--workers", "3", "--epochs", "20")
    with runs(tmp_path, "train", "--data", "digits", "--model", "mlp", "--json", *batches) as starter:
        yield starter


def job_paced(spec: str, folder: Path, restarts: int) -> Job:
    """Makes a job of six epochs, a fifth of a second each."""
    steps = folder / "steps"
    steps.mkdir()
    job = job_of(spec, folder / "run", restarts=restarts, epochs=EPOCHS, batch_size=4)
    return replace(job, make_model=lambda: Paced(steps, PAUSE_S))


def kinds(events: list[Event], kind: type[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, kind)]


def epochs_tested(events: list[Event]) -> list[tuple[int, float]]:
    return [(event.epoch, event.test_loss) for event in events if isinstance(event, Evaluated)]


def epochs_saved(events: list[Event]) -> list[int]:
    return [event.epoch for event in events if isinstance(event, CheckpointSaved)]


def kill_leader(*, when: type[Event]) -> tuple[Stage, ...]:
    """Kills worker 0 when it has said something, and waits for its successor's first steps."""
    return ((of(when), send(0, signal.SIGKILL)), (of(WorkerJoined), nothing), (steps_of(0), nothing))


def test_a_synchronous_run_has_the_bits_of_one_that_lost_nobody(tmp_path: Path) -> None:
    """Its leaders die between two steps, between a test and its checkpoint, and after a checkpoint."""
    job = job_paced("synchronous", tmp_path, restarts=3)
    undisturbed = simulated(replace(job, make_model=lambda: Paced(tmp_path / "steps", 0), keeping=Keeping()))
    deaths = [
        *kill_leader(when=CheckpointSaved),
        *kill_leader(when=Evaluated),
        *kill_leader(when=WorkerProgress),
    ]
    events = played(job, *deaths)
    result = result_of(events)
    assert (result["workers_lost"], result["workers_joined"], result["images_not_seen"]) == (3, 3, 0)
    assert (result["steps"], result["parameters_sha256"]) == (EPOCHS * LENGTH, undisturbed.sha256)
    assert epochs_tested(events) == epochs_tested(undisturbed.events)
    assert epochs_saved(events) == [1, 2, 3, 4, 5, 6]
    assert len(kinds(events, RunStarted)) == len(kinds(events, RunEnded)) == 1
    assert [event.to_json()["worker"] for event in kinds(events, WorkerLost)] == [0, 0, 0]
    assert kinds(events, Notice)[0].to_json()["text"] == (
        "worker 0 (rank 0) was killed by SIGKILL; the others wait for its successor, and it is started again at once "
        "(restart 1 of 3)"
    )


@pytest.mark.parametrize(("spec", "steps_lost"), [("local_sgd(steps=4)", 4), ("d_psgd", 1)])
def test_what_others_have_of_their_own_goes_on(spec: str, steps_lost: int, tmp_path: Path) -> None:
    job = job_paced(spec, tmp_path, restarts=1)
    events = played(job, *kill_leader(when=CheckpointSaved))
    result = result_of(events)
    assert (result["workers_lost"], result["workers_joined"]) == (1, 1)
    assert result["steps"] == EPOCHS * LENGTH
    assert 0 <= result["images_not_seen"] <= 4 * steps_lost
    assert [epoch for epoch, _ in epochs_tested(events)] == [1, 2, 3, 4, 5, 6]
    assert epochs_saved(events) == [1, 2, 3, 4, 5, 6]
    assert result["test_top1"] > 0.8


def test_if_all_are_killed_at_once_the_whole_run_starts_again(start: Starter) -> None:
    command = start("--strategy", "synchronous")
    command.wait_for(lambda event: isinstance(event, CheckpointSaved))
    for process in command.children():
        os.kill(process, signal.SIGKILL)
    restarted = command.wait_for(lambda event: isinstance(event, Restarted))
    assert isinstance(restarted, Restarted)
    assert restarted.text.startswith(
        "worker 0 (rank 0): all workers that held the parameters are lost, with worker 0; the run is started again "
        "(restart 1 of 3) from its last checkpoint, epoch "
    )
    figures = command.result().figures
    assert (figures["steps"], figures["restarts"], figures["images_not_seen"]) == (20 * 60, 1, 0)

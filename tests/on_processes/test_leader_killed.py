"""Worker 0 of workers that go in step is killed, again and again: real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from conformance.jobs import perceptron, result_of, simulated
from on_processes.brake import Brake
from on_processes.faults.play import Stage, job_of, nothing, of, played, process_of, steps_of
from on_processes.runs import Starter, runs
from polyrhythm import train
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
from polyrhythm.roles.job import CheckpointConfig, Job
from polyrhythm.roles.leading.leader import Leader
from processes.family import stopped

EPOCHS, LENGTH = 8, 20
"""Of 240 images in batches of four, each of three workers takes twenty steps an epoch."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    batches = ("--batch-size", "8", "--workers", "3", "--epochs", "6")
    words = ("train", "--data", "digits", "--model", "mlp", "--json", *batches)
    with runs(tmp_path, *words, brake=Brake(tmp_path / "brake", 60)) as starter:
        yield starter


def short_job(spec: str, folder: Path, restarts: int) -> Job:
    return job_of(spec, folder / "run", restarts=restarts, epochs=EPOCHS, batch_size=4)


def kinds(events: list[Event], kind: type[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, kind)]


def epochs_tested(events: list[Event]) -> list[tuple[int, float]]:
    return [(event.epoch, event.test_loss) for event in events if isinstance(event, Evaluated)]


def epochs_saved(events: list[Event]) -> list[int]:
    return [event.epoch for event in events if isinstance(event, CheckpointSaved)]


def kill_leader(when: type[Event], brake: Brake) -> tuple[Stage, ...]:
    """Kills worker 0 when it has said something, lets all go on, and waits for its successor's first steps."""

    def strike() -> None:
        os.kill(process_of(0), signal.SIGKILL)
        brake.release()

    return ((of(when), strike), (of(WorkerJoined), nothing), (steps_of(0), nothing))


def with_leaders_killed(job: Job, folder: Path, deaths: Sequence[type[Event]]) -> list[Event]:
    """Runs a job whose leaders are killed: each in the two epochs behind the first one's end or the last death's.

    All go slowly until then, from a quarter of the second of the two on: the run is as long as it must be.
    """
    brakes = [
        Brake(folder / f"death-{number}", (2 * number + 1) * LENGTH + LENGTH // 4)
        for number in range(len(deaths))
    ]
    stages = [stage for when, brake in zip(deaths, brakes, strict=True) for stage in kill_leader(when, brake)]
    braked = replace(
        job, make_model=lambda: reduce(lambda model, brake: brake.on(model), brakes, perceptron())
    )
    return played(braked, *stages)


def test_a_synchronous_run_has_the_bits_of_one_that_lost_nobody(tmp_path: Path) -> None:
    """Its leaders die between two steps, between a test and its checkpoint, and after a checkpoint."""
    job = short_job("synchronous", tmp_path, restarts=3)
    undisturbed = simulated(replace(job, checkpointing=CheckpointConfig()))
    events = with_leaders_killed(job, tmp_path, (CheckpointSaved, Evaluated, WorkerProgress))
    result = result_of(events)
    assert (result["workers_lost"], result["workers_joined"], result["images_not_seen"]) == (3, 3, 0)
    assert (result["steps"], result["parameters_sha256"]) == (EPOCHS * LENGTH, undisturbed.sha256)
    assert epochs_tested(events) == epochs_tested(undisturbed.events)
    # Steps go on while a checkpoint is written: on a busy machine the next is left out, and the one under way when its
    # writer is killed may not come.
    assert epochs_saved(events)[-1] == EPOCHS
    assert len(kinds(events, RunStarted)) == len(kinds(events, RunEnded)) == 1
    assert [event.to_json()["worker"] for event in kinds(events, WorkerLost)] == [0, 0, 0]
    notices = [str(event.to_json()["text"]) for event in kinds(events, Notice)]
    deaths = [
        text for text in notices if "was killed" in text
    ]  # others tell of who is slow on a busy machine
    assert len(deaths) == 3
    assert deaths[0] == (
        "worker 0 (rank 0) was killed by SIGKILL; the others wait for its replacement, and it is started again at once "
        "(restart 1 of 3)"
    )


@pytest.mark.parametrize(("spec", "steps_lost"), [("local_sgd(steps=4)", 4), ("d_psgd", 1)])
def test_what_others_have_of_their_own_goes_on(spec: str, steps_lost: int, tmp_path: Path) -> None:
    job = short_job(spec, tmp_path, restarts=1)
    events = with_leaders_killed(job, tmp_path, [CheckpointSaved])
    result = result_of(events)
    assert (result["workers_lost"], result["workers_joined"]) == (1, 1)
    assert result["steps"] == EPOCHS * LENGTH
    assert 0 <= result["images_not_seen"] <= 4 * steps_lost
    assert [epoch for epoch, _ in epochs_tested(events)] == list(range(1, EPOCHS + 1))
    assert (epochs_saved(events)[0], epochs_saved(events)[-1]) == (
        1,
        EPOCHS,
    )  # others while the machine is not busy
    assert result["test_top1"] > 0.8


def test_if_all_are_killed_at_once_the_whole_run_starts_again(start: Starter) -> None:
    command = start("--strategy", "synchronous")
    command.wait_for(lambda event: isinstance(event, CheckpointSaved))
    with stopped([command.process.pid]):  # for the launcher it is at once, however long it takes
        for process in command.children():
            os.kill(process, signal.SIGKILL)
    command.go_on()
    restarted = command.wait_for(lambda event: isinstance(event, Restarted))
    assert isinstance(restarted, Restarted)
    assert restarted.text.startswith(
        "worker 0 (rank 0): all workers with the parameters have failed, including worker 0; the run is started again "
        "(restart 1 of 3) from its last checkpoint, epoch "
    )
    figures = command.result().figures
    assert (figures["steps"], figures["restarts"], figures["images_not_seen"]) == (6 * 60, 1, 0)


@pytest.mark.parametrize("spec", ["local_sgd(steps=4)", "parameter_server"])
@pytest.mark.parametrize("released", [False, True])
def test_a_run_is_over_though_worker_0_dies_as_it_releases_the_others(
    released: bool, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just before or just after: no replacement waits for workers that have left, and no worker for a replacement."""
    release, dead = Leader.dismiss, tmp_path / "dead"

    def die(leader: Leader) -> None:
        if released or dead.exists():
            release(leader)
        if not dead.exists():
            dead.touch()
            time.sleep(0.2)  # until the others have left
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Leader, "dismiss", die)
    out = tmp_path / "run"
    job: Any = {"data": "digits", "model": "mlp", "workers": 3, "epochs": 2, "start_method": "fork"}
    run = train(strategy=spec, out=out, **job)
    assert dead.exists()
    assert run is not None
    assert run.outcome == "done"
    assert (out / "model.safetensors").exists()

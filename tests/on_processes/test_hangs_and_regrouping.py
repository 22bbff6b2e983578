"""Ranks that hang, and workers that go in step and lose one: real processes, stopped and killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conformance.jobs import blobs, perceptron, result_of, resumed, simulated
from on_processes.brake import Brake
from on_processes.commands import Started, wait_for
from on_processes.faults.play import (
    IMAGES,
    WORKERS,
    Stage,
    ask_to_stop,
    job_of,
    of,
    played,
    said,
    send,
    steps_of,
)
from on_processes.runs import Starter, runs
from polyrhythm.errors import RunError
from polyrhythm.events import CheckpointSaved, Event, Notice, RunStarted, WorkerJoined
from polyrhythm.launch import watchdog
from polyrhythm.launch.watchdog import LOST_AFTER
from polyrhythm.roles.job import CheckpointConfig

SILENCE_S = 1.0
"""Four of them take somebody for lost: longer than a busy machine lets those wait who are not."""

EPOCHS = 20
TRAIN = [
    *(
        "train",
        "--data",
        "digits",
        "--model",
        "mlp",
        "--json",
        "--batch-size",
        "8",
        "--workers",
        str(WORKERS),
    ),
    *("--epochs", str(EPOCHS)),
]
STEPS, STEPS_OF_EPOCH = EPOCHS * 60, 20


@pytest.fixture
def brake(tmp_path: Path) -> Brake:
    return Brake(tmp_path / "brake", 100)


@pytest.fixture
def start(tmp_path: Path, brake: Brake) -> Iterator[Starter]:
    with runs(tmp_path, *TRAIN, "--strategy", brake=brake) as starter:
        yield starter


def notice(text: str) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, Notice) and re.search(text, event.text) is not None


def ranks_under_way(command: Started, brake: Brake) -> list[int]:
    """Waits until all workers have trained for a while; gives their processes."""
    wait_for(lambda: len(command.children()) == WORKERS, "all ranks")
    ranks = command.children()
    wait_for(lambda: brake.reached_by(ranks), "all to be under way")
    return ranks


def test_a_stopped_worker_is_diagnosed_and_goes_on_when_it_is_continued(
    tmp_path: Path, brake: Brake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LOST_AFTER", 100)  # however late a busy machine continues it
    one_epoch = blobs(train=EPOCHS * IMAGES)  # so that whoever waits for the victim waits in a step
    job = job_of("synchronous", tmp_path, silence_s=SILENCE_S, epochs=1, dataset=one_epoch)
    job = replace(job, make_model=lambda: brake.on(perceptron()))
    stacks = tmp_path / "stacks" / "rank-0.txt"

    def go_on() -> None:
        """Continues it when worker 0 has told where it waits."""
        wait_for(
            lambda: stacks.exists() and re.search("in (all_reduce|wait)$", stacks.read_text(), re.M), "stacks"
        )
        send(1, signal.SIGCONT)()

    stages: tuple[Stage, ...] = (
        (steps_of(1), send(1, signal.SIGSTOP)),
        (said(r"^worker 1 \(rank 1\) has been silent"), go_on),
        (said(r"^worker 1 \(rank 1\) is back after"), brake.release),
    )
    events = played(job, *stages)
    text = next(event.text for event in events if stages[1][0](event) and isinstance(event, Notice))
    doing = r"(adding up over ranks 0, 1, 2|computing) for [\d.]+ s"
    assert re.match(
        r"worker 1 \(rank 1\) has been silent for [\d.]+ s: it is stopped, or cut off; last, at step \d+, it was "
        rf".+\. Others: worker 0 \(rank 0\): step \d+, {doing}; worker 2 \(rank 2\): step \d+, {doing}\. "
        r"After \d+ s it is taken for lost, and the run continues without it$",
        text,
    ), text
    assert float(re.findall(r"silent for ([\d.]+) s", text)[0]) >= SILENCE_S
    result = result_of(events)
    assert (result["workers_lost"], result["steps"], result["images_not_seen"]) == (
        0,
        EPOCHS * STEPS_OF_EPOCH,
        0,
    )


def test_a_stopped_worker_is_taken_for_lost_and_the_others_regroup(start: Starter, brake: Brake) -> None:
    command = start("synchronous", "--restarts", "0", "--silence-s", str(SILENCE_S))
    os.kill(ranks_under_way(command, brake)[1], signal.SIGSTOP)
    told = command.wait_for(notice(r"^worker 1 \(rank 1\) is taken for lost after"))
    brake.release()
    figures = command.result().figures
    assert isinstance(told, Notice)
    silent_s = float(re.findall(r"after ([\d.]+) s of silence", told.text)[0])
    assert silent_s >= LOST_AFTER * SILENCE_S
    assert (figures["workers_lost"], figures["steps"], figures["images_not_seen"]) == (1, STEPS, 0)
    assert figures["test_top1"] > 0.85
    assert command.find(notice(r"had been silent for \d+ s, and was evicted; the others continue$"))
    stacks = {path.name: path.read_text() for path in (command.run / "stacks").iterdir()}
    assert sorted(stacks) == ["rank-0.txt", "rank-2.txt"]  # of all that lived
    for rank in (0, 2):
        assert stacks[f"rank-{rank}.txt"].startswith(f"worker {rank} (rank {rank}): step ")
        assert "most recent call first" in stacks[f"rank-{rank}.txt"]


def test_without_regrouping_a_stopped_worker_ends_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    job = job_of("hybrid", tmp_path, silence_s=SILENCE_S)
    with pytest.raises(RunError, match=r"^worker 2 \(rank 2\) had been silent for \d+ s, and was evicted; c"):
        played(job, (of(CheckpointSaved), send(2, signal.SIGSTOP)))
    events = played(resumed(job), (of(CheckpointSaved), ask_to_stop))
    (begun,) = [event for event in events if isinstance(event, RunStarted)]
    assert begun.start_epoch > 0


def test_workers_that_average_models_go_on_without_a_killed_one_and_with_its_successor(
    start: Starter, brake: Brake
) -> None:
    """What it did in its round is not seen; its successor is there for the next one."""
    command = start("local_sgd(steps=8)")
    os.kill(ranks_under_way(command, brake)[1], signal.SIGKILL)
    command.wait_for(lambda event: isinstance(event, WorkerJoined))
    brake.release()
    figures = command.result().figures
    assert (figures["workers_lost"], figures["workers_joined"], figures["steps"]) == (1, 1, STEPS)
    assert 0 < figures["images_not_seen"] <= 8 * 8
    assert figures["test_top1"] > 0.85


def test_killed_workers_leave_the_same_model_as_if_nobody_had_been(tmp_path: Path) -> None:
    """Each step stays the batch that it was; successors get parameters and momentum."""
    brake = Brake(tmp_path / "brake", STEPS_OF_EPOCH)
    job = job_of("synchronous", tmp_path, restarts=2, epochs=EPOCHS, optimizer="sgd(momentum=0.9)")
    undisturbed = simulated(replace(job, checkpointing=CheckpointConfig()))
    result = result_of(
        played(
            replace(job, make_model=lambda: brake.on(perceptron())),
            (of(CheckpointSaved), send(1, signal.SIGKILL)),
            (of(WorkerJoined), send(2, signal.SIGKILL)),
            (of(WorkerJoined), brake.release),
        )
    )
    assert (result["workers_lost"], result["workers_joined"], result["images_not_seen"]) == (2, 2, 0)
    assert result["steps"] == undisturbed.result["steps"]
    saved = load_file(tmp_path / "model.safetensors")
    for name, value in undisturbed.models[0].named_parameters():
        assert torch.allclose(saved[name], value, atol=1e-5), name

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

from conformance.jobs import result_of, resumed, simulated
from multiprocess.commands import wait_for
from multiprocess.faults.killing import PAUSE_S
from multiprocess.faults.play import Paced, ask_to_stop, job_of, nothing, of, played, send
from multiprocess.runs import Starter, runs
from polyrhythm.errors import RunError
from polyrhythm.events import CheckpointSaved, Event, Notice, RunStarted, WorkerJoined, WorkerProgress
from polyrhythm.launch.watchdog import LOST_AFTER
from polyrhythm.roles.job import Keeping
from processes.family import stopped

SILENCE_S, BEAT_S = 0.6, 0.1
ROUNDING_S = 0.05 + 0.5 / LOST_AFTER
"""Of what is said."""

EPOCHS = 20
TRAIN = [
    *("train", "--data", "digits", "--model", "mlp", "--json", "--batch-size", "8", "--workers", "3"),
    *("--epochs", str(EPOCHS)),
]
STEPS = EPOCHS * 60


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    with runs(tmp_path, *TRAIN, "--strategy") as starter:
        yield starter


def under_way(event: Event) -> bool:
    return isinstance(event, WorkerProgress) and event.epoch >= 1


def notice(text: str) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, Notice) and re.search(text, event.text) is not None


def test_a_stopped_worker_is_diagnosed_and_goes_on_when_it_is_continued(start: Starter) -> None:
    command = start("synchronous", "--silence-s", str(SILENCE_S))
    command.wait_for(under_way)
    victim = command.children()[1]
    os.kill(victim, signal.SIGSTOP)
    said = command.wait_for(notice("has said nothing"))
    os.kill(victim, signal.SIGCONT)
    figures = command.result().figures
    assert isinstance(said, Notice)
    assert re.match(
        r"worker 1 \(rank 1\) has said nothing for [\d.]+ s: it is stopped, or cut off; last, at step \d+, it was "
        r".+\. Meanwhile: worker 0 \(rank 0\): step \d+, adding up over ranks 0, 1, 2 for [\d.]+ s; worker 2 .+\. "
        r"After \d+ s it is taken for lost, and the run goes on without it$",
        said.text,
    ), said.text
    silent_s = float(re.findall(r"nothing for ([\d.]+) s", said.text)[0])
    limit_s = int(re.findall(r"After (\d+) s", said.text)[0]) / LOST_AFTER
    assert SILENCE_S <= silent_s <= limit_s + 3 * BEAT_S + ROUNDING_S
    assert command.find(notice(r"worker 1 \(rank 1\) is back after"))
    assert (figures["workers_lost"], figures["steps"], figures["images_not_seen"]) == (0, STEPS, 0)
    stacks = (command.run / "stacks" / "rank-0.txt").read_text()
    assert "in all_reduce" in stacks or "in wait" in stacks


def test_a_stopped_worker_is_taken_for_lost_and_the_others_regroup(start: Starter) -> None:
    command = start("synchronous", "--restarts", "0", "--silence-s", str(SILENCE_S))
    command.wait_for(under_way)
    os.kill(command.children()[1], signal.SIGSTOP)
    said = command.wait_for(notice("is taken for lost after"))
    figures = command.result().figures
    assert isinstance(said, Notice)
    silent_s = float(re.findall(r"after ([\d.]+) s of silence", said.text)[0])
    assert silent_s >= LOST_AFTER * SILENCE_S
    assert (figures["workers_lost"], figures["steps"], figures["images_not_seen"]) == (1, STEPS, 0)
    assert figures["test_top1"] > 0.85
    assert command.find(notice(r"had said nothing for \d+ s, and was taken for lost; the others go on$"))


def test_without_regrouping_a_stopped_worker_ends_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    job = job_of("hybrid", tmp_path)
    with pytest.raises(
        RunError, match=r"^worker 2 \(rank 2\) had said nothing for \d+ s, and was taken for lost; c"
    ):
        played(job, (of(CheckpointSaved), send(2, signal.SIGSTOP)))
    events = played(resumed(job), (of(CheckpointSaved), ask_to_stop))
    (begun,) = [event for event in events if isinstance(event, RunStarted)]
    assert begun.start_epoch > 0


def test_workers_that_average_models_go_on_without_a_killed_one_and_with_its_successor(
    start: Starter,
) -> None:
    """What it did in its round is not seen; its successor is there for the next one."""
    command = start("local_sgd(steps=8)")
    command.wait_for(under_way)
    ranks = command.children()
    with stopped(ranks[:1]):  # or a quick run might be over before
        os.kill(ranks[1], signal.SIGKILL)
        wait_for(lambda: set(command.children()) - set(ranks), "the successor to start")
    figures = command.result().figures
    assert (figures["workers_lost"], figures["workers_joined"], figures["steps"]) == (1, 1, STEPS)
    assert 0 < figures["images_not_seen"] <= 8 * 8
    assert figures["test_top1"] > 0.85


def test_killed_workers_leave_the_same_model_as_if_nobody_had_been(tmp_path: Path) -> None:
    """Each step stays the batch that it was; successors get parameters and momentum."""
    steps = tmp_path / "steps"
    steps.mkdir()
    job = job_of("synchronous", tmp_path, restarts=2, epochs=20, optimizer="sgd(momentum=0.9)")
    job = replace(job, make_model=lambda: Paced(steps, PAUSE_S))
    quickly = replace(job, make_model=lambda: Paced(steps, 0.0), keeping=Keeping())
    undisturbed = simulated(quickly)
    result = result_of(
        played(
            job,
            (of(CheckpointSaved), send(1, signal.SIGKILL)),
            (of(WorkerJoined), send(2, signal.SIGKILL)),
            (of(WorkerJoined), nothing),
        )
    )
    assert (result["workers_lost"], result["workers_joined"], result["images_not_seen"]) == (2, 2, 0)
    assert result["steps"] == undisturbed.result["steps"]
    saved = load_file(tmp_path / "model.safetensors")
    for name, value in undisturbed.models[0].named_parameters():
        assert torch.allclose(saved[name], value, atol=1e-4), name

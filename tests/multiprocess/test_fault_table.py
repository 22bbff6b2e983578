"""The table of faults, cell by cell: every strategy's processes are stopped, continued, killed, and made to err."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from conformance.jobs import blobs, make_job, perceptron, result_of, strategy
from polyrhythm.api.faults import REPRESENTATIVES, VARIATIONS, Fault, Outcome, outcomes
from polyrhythm.errors import RequestError, RunError
from polyrhythm.events import CheckpointSaved, Event, Notice, WorkerLost, WorkerProgress
from polyrhythm.launch.local import run_local
from polyrhythm.roles.job import Job, Losses
from simulation.traces import default_strategies

WORKERS, SILENCE_S = 3, 0.6
STOPPED, KILLED, SERVER = 1, 2, WORKERS
Stage = tuple[Callable[[Event], bool], Callable[[], None]]
STRATEGIES = [*default_strategies(), *VARIATIONS]
SERVED = [spec for spec in STRATEGIES if strategy(spec).server_count]


@pytest.fixture(autouse=True)
def _one_thread_and_no_child_left() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()  # an error that an earlier test caught holds its run's store, which no child could tear down
    yield
    torch.set_num_threads(before)
    assert multiprocessing.active_children() == []


def job_of(spec: str, folder: Path, **learning: object) -> Job:
    """Makes a job that takes longer than any test, unless told otherwise."""
    learning = {"epochs": 100_000, "dataset": blobs(train=240)} | learning
    job = make_job(spec, WORKERS, folder=folder, **learning)  # type: ignore[arg-type]
    return replace(job, losses=Losses(silence_s=SILENCE_S, restarts=0))


def played(job: Job, *stages: Stage) -> list[Event]:
    """Runs a job; each stage waits for an event, and then does something about it."""
    events: list[Event] = []
    left = list(stages)

    def hear(event: Event) -> None:
        events.append(event)
        if left and left[0][0](event):
            left.pop(0)[1]()

    run_local(job, hear, threads=1)
    assert not left, "the run ended before all had been tried"
    return events


def send(rank: int, number: signal.Signals) -> Callable[[], None]:
    """Signals a rank's process."""

    def act() -> None:
        [process] = [
            child for child in multiprocessing.active_children() if child.name.endswith(f"rank {rank}")
        ]
        assert process.pid is not None
        os.kill(process.pid, number)

    return act


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def nothing() -> None:
    pass


def steps_of(worker: int) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, WorkerProgress) and event.worker == worker and event.steps > 0


def of(kind: type[Event]) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, kind)


def said(text: str) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, Notice) and re.search(text, event.text) is not None


TO_AND_FRO: tuple[Stage, ...] = (
    (steps_of(STOPPED), send(STOPPED, signal.SIGSTOP)),
    (said(rf"^worker {STOPPED} \(rank {STOPPED}\) has said nothing for"), send(STOPPED, signal.SIGCONT)),
    (said(rf"^worker {STOPPED} \(rank {STOPPED}\) is back after"), send(KILLED, signal.SIGKILL)),
)
PROGRESS: tuple[Stage, ...] = (
    *((steps_of(worker), nothing) for worker in (0, STOPPED) for _ in range(2)),
    (steps_of(0), ask_to_stop),
)
"""A report tells of the steps since the one before, so the second is of steps after the loss."""


@pytest.mark.parametrize("spec", STRATEGIES)
def test_a_worker_is_stopped_and_continued_and_another_is_killed(spec: str, tmp_path: Path) -> None:
    expected = outcomes(strategy(spec), WORKERS)
    assert expected[Fault.STOPPED] is Outcome.NAMED
    job = job_of(spec, tmp_path)
    if expected[Fault.WORKER_KILLED] is Outcome.STOPS:
        with pytest.raises(RunError, match=r"^worker 2 \(rank 2\) was killed by SIGKILL; continue with"):
            played(job, *TO_AND_FRO)
        return
    events = played(job, *TO_AND_FRO, (of(WorkerLost), nothing), *PROGRESS)
    assert events[-1].to_json()["outcome"] == "interrupted"
    assert [(event.worker, event.rank) for event in events if isinstance(event, WorkerLost)] == [(2, 2)]
    assert result_of(events)["workers_lost"] == 1


@pytest.mark.parametrize("spec", SERVED)
def test_a_server_is_killed(spec: str, tmp_path: Path) -> None:
    job, death = job_of(spec, tmp_path), (of(CheckpointSaved), send(SERVER, signal.SIGKILL))
    if outcomes(strategy(spec), WORKERS)[Fault.SERVER_KILLED] is Outcome.STOPS:
        with pytest.raises(RunError, match=r"^server 0 \(rank 3\) was killed by SIGKILL; continue with"):
            played(job, death)
        return
    events = played(job, death, (said(r"server 0 \(rank 3\) was killed by SIGKILL"), nothing), *PROGRESS)
    assert events[-1].to_json()["outcome"] == "interrupted"


@pytest.mark.parametrize("spec", REPRESENTATIVES)
def test_the_leader_is_killed(spec: str, tmp_path: Path) -> None:
    assert outcomes(strategy(spec), WORKERS)[Fault.LEADER_KILLED] is Outcome.STOPS
    with pytest.raises(RunError, match=r"^worker 0 \(rank 0\) was killed by SIGKILL; continue with --resume"):
        played(job_of(spec, tmp_path), (of(CheckpointSaved), send(0, signal.SIGKILL)))


class Erring(nn.Module):
    """A perceptron of which, in the process of worker 1, the gradients of the tenth step are not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron()
        self.errs = multiprocessing.current_process().name.endswith(f"rank {STOPPED}")
        self.steps = 0

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.inner(images)
        self.steps += self.training
        if self.errs and self.training and self.steps == 10:
            if not out.requires_grad:  # where workers share the layers, and this is what goes into them
                return out * math.nan
            out.register_hook(lambda gradient: gradient * math.nan)
        return out


@pytest.mark.parametrize("spec", STRATEGIES)
def test_a_workers_gradients_are_not_finite(spec: str, tmp_path: Path) -> None:
    expected = outcomes(strategy(spec), WORKERS)[Fault.NOT_FINITE]
    job = job_of(spec, tmp_path, model=Erring, epochs=4)
    if expected is Outcome.LEFT_OUT:
        result = result_of(played(job))
        shards = strategy(spec).shard_count
        assert (result["gradients_not_finite"], result["workers_ejected"]) == (shards, 0)
        assert math.isfinite(result["test_loss"])
    else:
        with pytest.raises(RequestError, match=r"the loss is nan at step \d+ of worker \d \(rank \d\)"):
            played(job)


@pytest.mark.parametrize("spec", REPRESENTATIVES)
def test_a_damaged_checkpoint_is_passed_over(spec: str, tmp_path: Path) -> None:
    assert outcomes(strategy(spec), WORKERS)[Fault.DAMAGED] is Outcome.OLDER
    job = job_of(spec, tmp_path, epochs=3)
    played(job)
    _, newest = sorted((tmp_path / "checkpoints").glob("step-*.safetensors"))
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    events = played(replace(job, keeping=replace(job.keeping, resume=True)))
    (notice,) = [event.text for event in events if isinstance(event, Notice) and newest.name in event.text]
    assert "and the run goes on from that: epoch 2, step" in notice
    assert result_of(events)["epochs"] == 3

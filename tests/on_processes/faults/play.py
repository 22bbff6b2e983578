"""A run of real processes to which something happens: it waits for an event, does harm, and waits for the next."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from conformance.jobs import blobs, make_job, perceptron
from polyrhythm.events import Event, Notice, WorkerProgress
from polyrhythm.launch.children import run_local
from polyrhythm.roles.job import FaultTolerance, Job

WORKERS, SILENCE_S, LONG_SILENCE_S = 3, 0.6, 60.0
IMAGES = 240
Stage = tuple[Callable[[Event], bool], Callable[[], None]]


class Paced(nn.Module):
    """A perceptron whose forward pass in training takes a while, and notes when it began.

    Args:
        folder: where each process keeps its times, as float64 of the monotonic clock.
        pause_s: of a forward pass, as on an accelerator: it takes no core.
    """

    def __init__(self, folder: Path, pause_s: float) -> None:
        super().__init__()
        self.inner = perceptron()
        self.folder, self.pause_s = folder, pause_s

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            with (self.folder / str(os.getpid())).open("ab") as file:
                file.write(torch.tensor([time.monotonic()], dtype=torch.float64).numpy().tobytes())
            time.sleep(self.pause_s)
        out: Tensor = self.inner(images)
        return out


def job_of(
    spec: str, folder: Path, restarts: int = 0, silence_s: float = LONG_SILENCE_S, **learning: object
) -> Job:
    """Makes a job that takes longer than any trial, and in which whoever is slow is not lost, unless told otherwise."""
    learning = {"epochs": 100_000, "dataset": blobs(train=IMAGES)} | learning
    job = make_job(spec, WORKERS, folder=folder, **learning)  # type: ignore[arg-type]
    return replace(job, fault_tolerance=FaultTolerance(silence_s=silence_s, restarts=restarts))


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


def process_of(rank: int) -> int:
    """Gives the process of a rank of the run that this process has started."""
    named = [child for child in multiprocessing.active_children() if child.name.endswith(f"rank {rank}")]
    assert len(named) == 1, named
    assert named[0].pid is not None
    return named[0].pid


def send(rank: int, number: signal.Signals) -> Callable[[], None]:
    """Signals a rank's process."""
    return lambda: os.kill(process_of(rank), number)


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


def progress(workers: Sequence[int], reports: int = 2) -> tuple[Stage, ...]:
    """Waits until each of some workers has gone on.

    A report tells of the steps since the one before, so the second is of steps after what has happened.
    """
    return tuple((steps_of(worker), nothing) for worker in workers for _ in range(reports))


def to_and_fro(rank: int, then: Callable[[], None] = nothing) -> tuple[Stage, ...]:
    """Stops a worker, and continues it when it has been named; then, when it is heard again, goes on to something."""
    name = rf"^worker {rank} \(rank {rank}\)"
    return (
        (steps_of(rank), send(rank, signal.SIGSTOP)),
        (said(rf"{name} has been silent for"), send(rank, signal.SIGCONT)),
        (said(rf"{name} is back after"), then),
    )

"""What a run as a whole comes to: how it starts, what it leaves, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polyrhythm.events.event import Event


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """Training starts.

    Attributes:
        strategy: its spec, as text.
        data: name of the data.
        model: name of the model.
        workers: number of workers.
        servers: number of servers.
        epochs: epochs to train.
        steps_per_epoch: steps that every worker takes in an epoch, the first one where they differ.
        start_epoch: epochs already done by the run that this one resumes.
        steps: that every worker takes in all; 0: as all epochs are alike, in all of them.
        start_step: steps before the epoch that this run begins with; 0 also where epochs are alike.
        earlier_s: seconds of training of the run that this one resumes.
        parameters: number of trained numbers in the model.
        free_running: whether no worker ever waits for a slower one.
        begun: what other numbers of workers did of epochs that were not over; empty if there were none.
    """

    strategy: str
    data: str
    model: str
    workers: int
    servers: int
    epochs: int
    steps_per_epoch: int
    start_epoch: int = 0
    parameters: int = 0
    steps: int = 0
    start_step: int = 0
    earlier_s: float = 0.0
    free_running: bool = False
    begun: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """The model was tested.

    Attributes:
        epoch: epochs done.
        test_loss: mean cross-entropy.
        test_top1: fraction of test images whose likeliest class is right.
        test_top5: the same for the five likeliest.
    """

    epoch: int
    test_loss: float
    test_top1: float
    test_top5: float


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is whole on disk.

    Attributes:
        path: of the file, inside the run folder.
        epoch: epochs done.
        step: steps that worker 0 had done.
    """

    path: str
    epoch: int
    step: int


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """Training is over.

    Attributes:
        outcome: `done`, `interrupted` or `failed`.
        result: the figures of the run, as `train --json` prints them.
    """

    outcome: str
    result: dict[str, Any]

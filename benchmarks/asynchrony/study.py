"""One training run in virtual time with real gradients, and what the studies of this folder note of it."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.data.dataset import Dataset, Split, TensorSplit
from polyrhythm.errors import RequestError
from polyrhythm.events import Event, RunEnded, WorkerProgress
from polyrhythm.roles.job import CheckpointConfig, Job
from polyrhythm.simulation.cluster import Cluster
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import simulate_on

WINDOW = 40
"""Gradients whose mean training loss must be down to the target."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        images_per_s: in virtual time.
        target_s: virtual seconds until the training loss was down to the target; None if it never was.
        top1: test accuracy, as a fraction.
        staleness: mean.
    """

    images_per_s: float
    target_s: float | None
    top1: float
    staleness: float


def job_of(options: dict[str, Any], train: int = 0, test: int = 0) -> Job:
    """Makes a job, of the first so many images if told."""
    job = assemble(configure(options), CheckpointConfig(checkpoints=0))
    if not train:
        return job
    data = job.dataset
    small = Dataset(
        data.name,
        _first(data.train, train),
        _first(data.test, test),
        data.classes,
        data.image_shape,
        data.default_epochs,
    )
    return replace(job, dataset=small)


def run(job: Job, cluster: Cluster, target: float = 0.0) -> Outcome | None:
    """Trains; None if the loss stopped being finite."""
    strategy = job.strategy
    layout = lay_out(
        cluster, job.workers, strategy.traits(job.workers).servers, strategy.traits(job.workers).placement
    )
    losses: deque[float] = deque(maxlen=WINDOW)
    found: dict[str, Any] = {"target_s": None}

    def hear(event: Event) -> None:
        if isinstance(event, WorkerProgress) and event.steps:
            losses.extend([event.loss] * event.steps)
            if found["target_s"] is None and len(losses) == WINDOW and statistics.mean(losses) <= target:
                found["target_s"] = event.time_s
        elif isinstance(event, RunEnded):
            found["result"] = event.result

    try:
        simulate_on(layout, job, hear)
    except RequestError as error:
        if "the loss is" not in str(error):
            raise
        return None
    result = found["result"]
    return Outcome(
        result["images_per_s"], found["target_s"], result["test_top1"], result["staleness"]["mean"]
    )


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return mean ± deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {deviation:.{digits}f}"


def _first(split: Split, count: int) -> TensorSplit:
    order = torch.arange(min(count, len(split)))
    return TensorSplit(split.images(order), split.labels[order])

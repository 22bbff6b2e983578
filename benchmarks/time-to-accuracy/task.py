"""The job of this study, and what both of its programs do with a run of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from polyrhythm.config.assemble import strategy_from
from polyrhythm.data.dataset import Dataset, TensorSplit
from polyrhythm.data.open import open_data
from polyrhythm.events import Evaluated, Event
from polyrhythm.models.create import create_model
from polyrhythm.roles.job import CheckpointConfig, Job, Learning
from polyrhythm.roles.world import StopRequest
from polyrhythm.simulation.cluster import Cluster, HostKind, Link
from polyrhythm.training.optimizers.sgd import SGD
from polyrhythm.training.schedules.constant import Constant

BATCH = 32
EPOCHS = 15
TRAIN, TEST = 5_000, 2_000
RATE = 0.05
SLOW_RANK, SLOWER = 3, 3.0
NETWORKS = {  # usable bytes a second of each direction, and seconds of latency
    "100 Mb/s": Link(bandwidth_bytes_per_s=1.17e7, latency_s=1e-4),
    "1 Gb/s": Link(bandwidth_bytes_per_s=1.17e8, latency_s=1e-4),
    "25 Gb/s": Link(bandwidth_bytes_per_s=2.9e9, latency_s=2e-5),
}


@dataclass(frozen=True)
class Trial:
    """What one run came to; None: the accuracy was not reached.

    Attributes:
        strategy: its spec.
        network: between hosts.
        straggler: whether one host was slower.
        seed: of weights, shuffles and step times.
        seconds: until the test that reached the target.
        best: the best test accuracy that was seen.
    """

    strategy: str
    network: str
    straggler: bool
    seed: int
    seconds: float | None
    best: float


class Watch:
    """Wishes to stop when a test reaches the target."""

    def __init__(self, target: float) -> None:
        self.stop = StopRequest()
        self.seconds: float | None = None
        self.best = 0.0
        self._target = target

    def on_event(self, event: Event) -> None:
        if not isinstance(event, Evaluated):
            return
        self.best = max(self.best, event.test_top1)
        if self.seconds is None and event.test_top1 >= self._target:
            self.seconds = event.time_s
            self.stop.request()


def _first_of(split: TensorSplit, count: int) -> TensorSplit:
    chosen = torch.arange(count)
    return TensorSplit(split.images(chosen), split.labels[:count])


def some_fashion() -> Dataset:
    whole = open_data("fashion-mnist")
    parts = _first_of(whole.train, TRAIN), _first_of(whole.test, TEST)
    return Dataset("fashion-mnist (first)", *parts, whole.classes, whole.image_shape, default_epochs=EPOCHS)


def job_of(data: Dataset, spec: str, workers: int, seed: int) -> Job:
    """Makes the job; free-running workers share the learning rate."""
    strategy = strategy_from(spec)
    return Job(
        strategy=strategy,
        workers=workers,
        dataset=data,
        make_model=lambda: create_model("mlp", classes=10, image_shape=data.image_shape),
        model_name="mlp",
        learning=Learning(
            optimizer=SGD(lr=RATE / strategy.traits(workers).updates),
            schedule=Constant(),
            epochs=EPOCHS,
            batch_size=BATCH,
            seed=seed,
        ),
        checkpointing=CheckpointConfig(checkpoints=0),
    )


def cluster_of(network: str, hosts: int, step_time: str, slower: float = 1.0) -> Cluster:
    """Makes a cluster of equal hosts, one of which may take longer for its steps."""
    return Cluster(
        name=network,
        hosts=(HostKind(name="host", count=hosts, cores=4),),
        nic=NETWORKS[network],
        inside=Link(latency_s=2e-5, bandwidth_bytes_per_s=4e9),
        step_time=step_time,
        slow={SLOW_RANK: slower} if slower != 1 else {},
    )


def cell(trials: Sequence[Trial]) -> str:
    """Mean and deviation of the seconds, or how many never got there."""
    times = [entry.seconds for entry in trials if entry.seconds is not None]
    if len(times) < len(trials):
        best = max(entry.best for entry in trials)
        return f"{len(trials) - len(times)} of {len(trials)} never ({best:.3f})"
    deviation = statistics.stdev(times) if len(times) > 1 else 0.0
    return f"{statistics.mean(times):.2f} ± {deviation:.2f}"

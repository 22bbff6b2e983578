"""What simulating costs beside the gradients themselves, when they are real.

    python benchmarks/simulator-speed/overhead.py [--model lenet5] [--workers 8] [--steps 6] [--strategy S ...]

Counted from the first forward pass to the last backward pass, in seconds of the processor, one thread: forward and
backward passes; updates; everything else, which is the simulator's share (batches, messages, links, greenlets).
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor

from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.data.dataset import Dataset, TensorSplit
from polyrhythm.roles.job import CheckpointConfig
from polyrhythm.roles.world import Announce, DrawnPace
from polyrhythm.simulation import simulated_run
from polyrhythm.simulation.cluster import open_cluster
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import simulate_on
from polyrhythm.training.flat_optimizer import FlatOptimizer


class Stopwatch:
    """Seconds of the processor in passes and in updates, and from the first pass to the last."""

    def __init__(self) -> None:
        self.passes_s = self.updates_s = 0.0
        self.passes = 0
        self.first_s = self.last_s = 0.0

    def total_s(self) -> float:
        return self.last_s - self.first_s


def timed(watch: Stopwatch) -> tuple[type, type]:
    """Return the pace and the optimizer whose time is taken."""

    class TimedPace(DrawnPace):
        def forward(self, shares: Sequence[float], use: Announce, work: float = 1.0) -> None:
            super().forward(shares, use, work)
            self.began_s = time.process_time()  # between here and `backward` no other rank runs
            watch.first_s = watch.first_s or self.began_s

        def backward(self, shares: Sequence[float], ready: Announce) -> None:
            watch.last_s = time.process_time()
            watch.passes_s += watch.last_s - self.began_s
            watch.passes += 1
            super().backward(shares, ready)

    class TimedOptimizer(FlatOptimizer):
        def step(self, gradient: Tensor, learning_rate: float) -> None:
            began_s = time.process_time()
            super().step(gradient, learning_rate)
            watch.updates_s += time.process_time() - began_s

    return TimedPace, TimedOptimizer


def pictures(count: int) -> Dataset:
    """Makes noise of the size of Fashion-MNIST's pictures: what is learned does not matter here."""
    generator = torch.Generator().manual_seed(0)

    def split(size: int) -> TensorSplit:
        images = torch.randn(size, 1, 28, 28, generator=generator)
        return TensorSplit(images, torch.randint(10, (size,), generator=generator))

    classes = tuple(str(number) for number in range(10))
    return Dataset("noise", split(count), split(64), classes, (1, 28, 28), default_epochs=1)


def measure(strategy: str, options: argparse.Namespace) -> Stopwatch:
    """Simulates a run with real gradients."""
    given = {
        "data": "fashion-mnist", "model": options.model, "workers": options.workers, "strategy": strategy, "epochs": 1,
    }  # fmt: skip
    dataset = pictures(options.workers * options.steps * 64)
    with mock.patch("polyrhythm.config.assemble.open_data", return_value=dataset):
        job = assemble(configure({}, given), CheckpointConfig())
    job = dataclasses.replace(job, dataset=dataset)
    layout = lay_out(open_cluster(options.cluster), job.workers, job.traits.servers, job.traits.placement)
    watch = Stopwatch()
    pace, optimizer = timed(watch)
    with (
        mock.patch.object(simulated_run, "DrawnPace", pace),
        mock.patch("polyrhythm.training.optimizer_plan.FlatOptimizer", optimizer),
    ):
        simulate_on(layout, job, lambda event: None)
    return watch


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="lenet5")
    options.add_argument("--workers", type=int, default=8)
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--cluster", default="office")
    options.add_argument("--strategy", nargs="+", default=["parameter_server", "synchronous"])
    chosen = options.parse_args()
    torch.set_num_threads(1)
    print(
        "| strategy | gradients | a pass, ms | updates, ms a pass | the rest, ms a pass | the rest, of the passes |"
    )
    print("|---|---|---|---|---|---|")
    for strategy in chosen.strategy:
        watch = measure(strategy, chosen)
        rest_s = watch.total_s() - watch.passes_s - watch.updates_s
        per_pass = [1e3 * seconds / watch.passes for seconds in (watch.passes_s, watch.updates_s, rest_s)]
        cells = " | ".join(f"{value:.2f}" for value in per_pass)
        print(f"| `{strategy}` | {watch.passes} | {cells} | {rest_s / watch.passes_s:.1%} |", flush=True)


if __name__ == "__main__":
    main()

"""Time to an accuracy: which strategy gets there first, on which network, with and without a straggler.

    python benchmarks/time-to-accuracy/measure.py [--seeds 3] [--target 0.82] [--strategies "S1; S2"] [--out DIR]

Eight simulated hosts of one worker each; real gradients of `mlp` on the first 5,000 pictures of Fashion-MNIST, tested
on the first 2,000 after every 20 steps of a worker. Times are virtual: steps of 10 ms (median), and messages as links
carry them. Where workers' models differ, a test costs an exchange, which is counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from polyrhythm.config.assemble import strategy_from
from polyrhythm.data.dataset import Dataset, TensorSplit
from polyrhythm.data.open import open_data
from polyrhythm.events import Evaluated, Event
from polyrhythm.models.create import create_model
from polyrhythm.roles.job import Job, Keeping, Learning
from polyrhythm.roles.world import StopWish
from polyrhythm.simulation.cluster import Cluster, HostKind, Link
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import simulate_on
from polyrhythm.training.optimizers.sgd import SGD
from polyrhythm.training.schedules.constant import Constant

HOSTS = 8
BATCH = 32
EPOCHS = 15
TRAIN, TEST = 5_000, 2_000
RATE = 0.05
SLOW_RANK, SLOWER = 3, 3.0
STRATEGIES = (
    "synchronous(collective=auto)",
    "local_sgd(steps=8, collective=auto)",
    "local_sgd(steps=32, collective=auto)",
    "diloco(steps=32, collective=auto)",
    "periodic_averaging(steps=8)",
    "sgp",
    "ad_psgd",
)
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
        seconds: virtual, until the test that reached the target.
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
        self.stop = StopWish()
        self.seconds: float | None = None
        self.best = 0.0
        self._target = target

    def on_event(self, event: Event) -> None:
        if not isinstance(event, Evaluated):
            return
        self.best = max(self.best, event.test_top1)
        if self.seconds is None and event.test_top1 >= self._target:
            self.seconds = event.time_s
            self.stop.wish()


def first_of(split: TensorSplit, count: int) -> TensorSplit:
    chosen = torch.arange(count)
    return TensorSplit(split.images(chosen), split.labels[:count])


def some_fashion() -> Dataset:
    whole = open_data("fashion-mnist")
    parts = first_of(whole.train, TRAIN), first_of(whole.test, TEST)
    return Dataset("fashion-mnist (first)", *parts, whole.classes, whole.image_shape, default_epochs=EPOCHS)


def cluster_of(network: str, straggler: bool) -> Cluster:
    return Cluster(
        name=network,
        hosts=(HostKind(name="host", count=HOSTS, cores=4),),
        nic=NETWORKS[network],
        inside=Link(latency_s=2e-5, bandwidth_bytes_per_s=4e9),
        step_time="log_normal(median=0.01, sigma=0.1)",
        slow={SLOW_RANK: SLOWER} if straggler else {},
    )


def trial(data: Dataset, spec: str, network: str, straggler: bool, seed: int, target: float) -> Trial:
    strategy = strategy_from(spec)
    job = Job(
        strategy=strategy,
        workers=HOSTS,
        dataset=data,
        make_model=lambda: create_model("mlp", classes=10, image_shape=data.image_shape),
        model_name="mlp",
        learning=Learning(
            optimizer=SGD(lr=RATE / strategy.updates_per_step(HOSTS)),
            schedule=Constant(),
            epochs=EPOCHS,
            batch_size=BATCH,
            seed=seed,
        ),
        keeping=Keeping(checkpoints=0),
    )
    layout = lay_out(cluster_of(network, straggler), HOSTS, strategy.server_count, strategy.server_placement)
    watch = Watch(target)
    simulate_on(layout, job, watch.on_event, stop=watch.stop)
    return Trial(spec, network, straggler, seed, watch.seconds, watch.best)


def cell(trials: list[Trial]) -> str:
    """Mean and deviation of the seconds, or how many never got there."""
    times = [entry.seconds for entry in trials if entry.seconds is not None]
    if len(times) < len(trials):
        return (
            f"{len(trials) - len(times)} of {len(trials)} never ({max(entry.best for entry in trials):.3f})"
        )
    deviation = statistics.stdev(times) if len(times) > 1 else 0.0
    return f"{statistics.mean(times):.2f} ± {deviation:.2f}"


def table(trials: list[Trial], strategies: list[str]) -> str:
    columns = [(network, straggler) for straggler in (False, True) for network in NETWORKS]
    names = [f"{network}{', straggler' if straggler else ''}" for network, straggler in columns]
    lines = ["| strategy | " + " | ".join(names) + " |", "|---" * (len(columns) + 1) + "|"]
    for spec in strategies:
        cells = [
            cell(
                [each for each in trials if (each.strategy, each.network, each.straggler) == (spec, *column)]
            )
            for column in columns
        ]
        lines.append(f"| `{spec}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--target", type=float, default=0.82)
    options.add_argument("--strategies", type=lambda text: text.split("; "), default=[*STRATEGIES])
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    data = some_fashion()
    trials = [
        trial(data, spec, network, straggler, seed, chosen.target)
        for spec in chosen.strategies
        for straggler in (False, True)
        for network in NETWORKS
        for seed in range(chosen.seeds)
    ]
    print(table(trials, chosen.strategies))
    if chosen.out is not None:
        text = json.dumps([asdict(entry) for entry in trials], indent=1)
        (chosen.out / "results.json").write_text(text + "\n")


if __name__ == "__main__":
    main()

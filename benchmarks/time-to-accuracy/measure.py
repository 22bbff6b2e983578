"""Time to an accuracy: which strategy gets there first, on which network, with and without a straggler.

    python benchmarks/time-to-accuracy/measure.py [--seeds 3] [--target 0.82] [--strategies "S1; S2"] [--out DIR]

Eight simulated hosts of one worker each; real gradients of `mlp` on the first 5,000 pictures of Fashion-MNIST, tested
on the first 2,000 after every 20 steps of a worker. Times are virtual: steps of 10 ms (median), and messages as links
carry them. Where workers' models differ, a test costs an exchange, which is counted.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from task import NETWORKS, SLOWER, Trial, Watch, cell, cluster_of, job_of, some_fashion

from polyrhythm.data.dataset import Dataset
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import simulate_on

HOSTS = 8
STRATEGIES = (
    "synchronous(collective=auto)",
    "local_sgd(steps=8, collective=auto)",
    "local_sgd(steps=32, collective=auto)",
    "diloco(steps=32, collective=auto)",
    "periodic_averaging(steps=8)",
    "sgp",
    "ad_psgd",
)
STEP_TIME = "log_normal(median=0.01, sigma=0.1)"


def trial(data: Dataset, spec: str, network: str, straggler: bool, seed: int, target: float) -> Trial:
    job = job_of(data, spec, HOSTS, seed)
    cluster = cluster_of(network, HOSTS, STEP_TIME, SLOWER if straggler else 1.0)
    layout = lay_out(cluster, HOSTS, job.strategy.traits(HOSTS).servers, job.strategy.traits(HOSTS).placement)
    watch = Watch(target)
    simulate_on(layout, job, watch.on_event, stop=watch.stop)
    return Trial(spec, network, straggler, seed, watch.seconds, watch.best)


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

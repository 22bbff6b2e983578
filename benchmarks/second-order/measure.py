"""Epochs to an accuracy: K-FAC beside SGD.

    python benchmarks/second-order/measure.py [--seeds 3] [--target 0.90] [--images 60000] [--out DIR] [--only SPEC]

`lenet5` on Fashion-MNIST by 2 workers of 64 pictures a step that average their gradients, in virtual time with real
gradients; tested after every epoch. What is in DIR already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.data.dataset import Dataset, TensorSplit
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.target import Target
from polyrhythm.events import Evaluated, Event
from polyrhythm.roles.job import CheckpointConfig
from polyrhythm.simulation.run import ConstantCluster, simulate

OPTIMIZERS = ("sgd", "sgd(lr=0.02)", "sgd(lr=0.1)", "kfac")
EPOCHS = 10


def first(split: TensorSplit, count: int) -> TensorSplit:
    """Gives the first so many pictures."""
    return TensorSplit(split.images(torch.arange(count)), split.labels[:count])


def accuracies(optimizer: str, seed: int, chosen: argparse.Namespace) -> list[float]:
    """Trains until the target; gives the accuracy after every epoch."""
    options: dict[str, Any] = {
        "data": "fashion-mnist",
        "model": chosen.model,
        "optimizer": optimizer,
        "schedule": chosen.schedule,
        "workers": 2,
        "batch_size": 64,
        "epochs": chosen.epochs,
        "seed": seed,
    }
    job = assemble(configure(options), CheckpointConfig(checkpoints=0))
    if chosen.images < 60_000:
        data = job.dataset
        parts = first(data.train, chosen.images), first(data.test, 5_000)
        small = Dataset(data.name, *parts, data.classes, data.image_shape, data.default_epochs)
        job = replace(job, dataset=small)
    job = replace(job, until=Target.parse(f"top1={chosen.target}"))
    found: list[float] = []

    def hear(event: Event) -> None:
        if isinstance(event, Evaluated):
            found.append(event.test_top1)

    try:
        for event in simulate(job, ConstantCluster()):
            hear(event)
    except RequestError:
        found.append(0.0)  # the loss is not finite any more
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.90)
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--schedule", default="constant")
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only")
    chosen = parser.parse_args()
    path = None if chosen.out is None else chosen.out / "results.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path is not None and path.is_file() else {}
    for optimizer in [chosen.only] if chosen.only else OPTIMIZERS:
        for seed in range(chosen.seeds):
            of_optimizer = known.setdefault(optimizer, {})
            if str(seed) in of_optimizer:
                continue
            began_s = time.process_time()
            curve = accuracies(optimizer, seed, chosen)
            seconds = time.process_time() - began_s
            of_optimizer[str(seed)] = {"top1": curve, "processor_s": round(seconds, 1)}
            print(optimizer, seed, [round(value, 4) for value in curve], f"{seconds:.0f} s", flush=True)
            if path is not None:
                path.write_text(json.dumps(known, indent=1) + "\n")
    lines = ["| optimiser | epochs | processor seconds of an epoch |", "|---|---|---|"]
    for optimizer, seeds in known.items():
        epochs = [
            str(len(run["top1"])) if max(run["top1"]) >= chosen.target else f"not in {len(run['top1'])}"
            for run in seeds.values()
        ]
        cost = statistics.mean(run["processor_s"] / len(run["top1"]) for run in seeds.values())
        lines.append(f"| `{optimizer}` | {', '.join(epochs)} | {cost:.0f} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

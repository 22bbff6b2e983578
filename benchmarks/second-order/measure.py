"""Epochs to an accuracy: K-FAC beside SGD.

    python benchmarks/second-order/measure.py [--seeds 3] [--target 0.95] [--data digits] [--images N] [--out DIR]
        [--only "kfac; sgd(lr=0.1)"] [--most N]

`lenet5(widths=[8, 16], hidden=64)` by 2 workers that average their gradients at every step, in virtual time with real
gradients; tested after every epoch. What DIR has of the same study already is not measured again (a file for each set
of data, with what was asked for; another model or batch size of the same data is refused); `--most` ends after so many
runs.
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

OPTIMIZERS = (
    "sgd(lr=0.02)",
    "sgd",
    "sgd(lr=0.1)",
    "sgd(lr=0.2)",
    "sgd(lr=0.4)",
    "adam",
    "kfac",
    "kfac(lr=0.03)",
    "adascale(lr=0.1)",
)
EPOCHS = 12


def first(split: TensorSplit, count: int) -> TensorSplit:
    """Gives the first so many pictures."""
    return TensorSplit(split.images(torch.arange(count)), split.labels[:count])


def accuracies(optimizer: str, seed: int, chosen: argparse.Namespace) -> list[float]:
    """Trains until the target; gives the accuracy after every epoch."""
    options: dict[str, Any] = {
        "data": chosen.data,
        "model": chosen.model,
        "optimizer": optimizer,
        "schedule": chosen.schedule,
        "workers": 2,
        "batch_size": chosen.batch_size,
        "epochs": chosen.epochs,
        "seed": seed,
    }
    job = assemble(configure(options), CheckpointConfig(checkpoints=0))
    if chosen.images:
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


ASKED = ("data", "model", "batch_size", "schedule", "epochs", "target", "images")
"""What makes a study; runs of another one are not comparable."""


def known_of(path: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Gives the runs that a study's file has, by optimizer and seed."""
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    if found["asked"] != asked:
        raise SystemExit(f"{path} is of another study ({found['asked']}): name another folder with --out")
    return dict(found["runs"])


def reached(curve: list[float], target: float) -> int | None:
    """Gives the first epoch whose test was as good as the target."""
    return next((number for number, top1 in enumerate(curve, 1) if top1 >= target), None)


def crossed(curve: list[float], target: float) -> float | None:
    """Gives the epochs to the target by a straight line from the last test below it to the first that reached it."""
    number = reached(curve, target)
    if number is None or number == 1:
        return number
    before, after = curve[number - 2 : number]
    return number - 1 + (target - before) / (after - before)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.95)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--images", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--schedule", default="constant")
    parser.add_argument("--model", default="lenet5(widths=[8, 16], hidden=64)")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="optimizers, with ; between")
    parser.add_argument("--most", type=int, default=1_000)
    chosen = parser.parse_args()
    asked = {key: vars(chosen)[key] for key in ASKED}
    path = None if chosen.out is None else chosen.out / f"{chosen.data}.json"
    known = {} if path is None else known_of(path, asked)
    optimizers = [each.strip() for each in chosen.only.split(";")] if chosen.only else OPTIMIZERS
    left = chosen.most
    for seed in range(chosen.seeds):
        for optimizer in optimizers:
            of_optimizer = known.setdefault(optimizer, {})
            if str(seed) in of_optimizer or not left:
                continue
            left -= 1
            began_s = time.process_time()
            curve = accuracies(optimizer, seed, chosen)
            seconds = time.process_time() - began_s
            of_optimizer[str(seed)] = {"top1": curve, "processor_s": round(seconds, 1)}
            print(optimizer, seed, [round(value, 4) for value in curve], f"{seconds:.0f} s", flush=True)
            if path is not None:
                path.write_text(json.dumps({"asked": asked, "runs": known}, indent=1) + "\n")
    lines = [
        f"| optimizer | epochs to {chosen.target:g} | mean | between tests, by a line | mean | "
        "processor seconds of an epoch |",
        "|---|---|---|---|---|---|",
    ]
    for optimizer, seeds in known.items():
        if not seeds:
            continue
        # A run ends a test after the one that reached the target, which is made beside training.
        needed = [reached(run["top1"], chosen.target) for run in seeds.values()]
        told = ", ".join("never" if epochs is None else str(epochs) for epochs in needed)
        mean = "" if None in needed else f"{statistics.mean(each for each in needed if each):.1f}"
        finer = [crossed(run["top1"], chosen.target) for run in seeds.values()]
        told += f" | {mean} | " + ", ".join("–" if epochs is None else f"{epochs:.2f}" for epochs in finer)
        mean = "" if None in finer else f"{statistics.mean(each for each in finer if each):.2f}"
        cost = statistics.mean(run["processor_s"] / len(run["top1"]) for run in seeds.values())
        lines.append(f"| `{optimizer}` | {told} | {mean} | {cost:.2f} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

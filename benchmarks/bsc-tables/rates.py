"""Which learning rate does which size of a group bear? `mixed(replicas=R)` on 4 nodes of 4 GPUs, in virtual time.

    python benchmarks/bsc-tables/rates.py [--seeds 0 1] [--out benchmarks/bsc-tables]

The paper (section 5) makes groups of a node's four replicas, whose gradients are of larger batches and so bear larger
rates. Here 16 workers of cluster `bsc_gpus` train `lenet5` on the digits, 8 images each, with the paper's optimizer.
Every cell has as many images; R = 1 is asynchronous training of single workers, R = 16 one synchronous group.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

import torch

import polyrhythm

WORKERS, BATCH, EPOCHS = 16, 8, 8
GROUPS = (1, 2, 4, 16)
RATES = (0.05, 0.1, 0.2, 0.4, 0.8)


def accuracy(replicas: int, rate: float, seed: int) -> float:
    """Return the test accuracy of a run in percent; that of a guess if it diverged."""
    with TemporaryDirectory() as place:
        try:
            run = polyrhythm.simulate(
                cluster="bsc_gpus",
                data="digits",
                model="lenet5",
                strategy=f"mixed(replicas={replicas}, servers=3)",
                workers=WORKERS,
                batch_size=BATCH,
                epochs=EPOCHS,
                optimizer=f"tf1_rmsprop(lr={rate}, decay=0.9, epsilon=1.0, weight_decay=0.0001)",
                schedule="constant",
                seed=seed,
                out=Path(place) / "run",
            )
        except polyrhythm.PolyrhythmError as error:
            if "loss is" not in str(error):
                raise
            return 10.0
    return 100 * run.figures["test_top1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    cells, lines = [], []
    lines.append("| replicas in a group | " + " | ".join(f"lr {rate:g}" for rate in RATES) + " |")
    lines.append("|---" * (1 + len(RATES)) + "|")
    for replicas in GROUPS:
        texts = []
        for rate in RATES:
            found = [accuracy(replicas, rate, seed) for seed in given.seeds]
            cells.append({"replicas": replicas, "lr": rate, "test_top1": found})
            spread = f" ± {stdev(found):.1f}" if len(found) > 1 else ""
            texts.append((mean(found), f"{mean(found):.1f}{spread}"))
        best = max(texts)[0]
        row = [f"**{text}**" if value == best else text for value, text in texts]
        lines.append(f"| {replicas} | " + " | ".join(row) + " |")
        print(lines[-1], flush=True)
    if given.out is not None:
        command = f"python benchmarks/bsc-tables/rates.py --seeds {' '.join(map(str, given.seeds))}"
        facts = {"command": command, "cells": cells}
        (given.out / "rates.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        text = "\n".join([f"`{command}`", "", "Test accuracy in percent.", "", *lines])
        (given.out / "rates.md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

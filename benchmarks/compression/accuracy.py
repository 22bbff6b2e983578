"""What compression costs in accuracy: lenet5 on Fashion-MNIST, 4 workers, several seeds, simulated.

    python benchmarks/compression/accuracy.py --epochs 1 --seeds 3 --out results.json

Runs are written one by one, and those that are in the file already are not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.roles.job import CheckpointConfig
from polyrhythm.simulation.run import simulate

PLAIN = "sgd(lr=0.05, momentum=0.9)"
BARE = "sgd(lr=0.05, momentum=0)"
VOTES = "sgd(lr=0.0003, momentum=0)"
CASES = {
    "nothing": (None, PLAIN),
    "dgc(density=0.001)": ("dgc(density=0.001, warm_up=120, clip=2.0)", BARE),
    "top_k(density=0.01)": ("top_k(density=0.01)", PLAIN),
    "power_sgd(rank=2)": ("power_sgd(rank=2)", PLAIN),
    "qsgd, 4 bits": ("qsgd(levels=7)", PLAIN),
    "one_bit": ("one_bit", PLAIN),
    "sign_sgd": ("sign_sgd", VOTES),
    "signum": ("signum(momentum=0.9)", VOTES),
}


def run(case: str, seed: int, epochs: int) -> dict[str, Any]:
    """Trains once; returns the accuracy and the bytes that a worker sent a step."""
    compress, optimizer = CASES[case]
    options = {
        "data": "fashion-mnist",
        "model": "lenet5",
        "workers": 4,
        "batch_size": 32,
        "epochs": epochs,
        "seed": seed,
        "strategy": "synchronous",
        "compress": compress,
        "optimizer": optimizer,
    }
    job = assemble(configure(options), CheckpointConfig(checkpoints=0))
    ended = simulate(job)[-1].to_json()["result"]
    return {
        "case": case,
        "seed": seed,
        "epochs": epochs,
        "top1": ended["test_top1"],
        "bytes_per_step": ended["bytes_sent_per_step"],
    }


def main() -> None:
    """Makes the runs that are missing, and prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    done = json.loads(given.out.read_text()) if given.out.exists() else []
    for seed in range(given.seeds):
        for case in CASES:
            key = (case, seed, given.epochs)
            if all((row["case"], row["seed"], row["epochs"]) != key for row in done):
                done.append(run(*key))
                given.out.write_text(json.dumps(done, indent=1) + "\n")
    print("| compress | top-1, mean | of seeds | bytes a worker and step | of whole |\n|---|---|---|---|---|")
    whole = next(row["bytes_per_step"] for row in done if row["case"] == "nothing")
    for case in CASES:
        rows = [row for row in done if row["case"] == case and row["epochs"] == given.epochs]
        if rows:
            each = ", ".join(f"{100 * row['top1']:.2f}" for row in rows)
            mean, sent = statistics.mean(row["top1"] for row in rows), rows[0]["bytes_per_step"]
            print(f"| `{case}` | {100 * mean:.2f} % | {each} | {sent:,.0f} | {sent / whole:.4f} |")


if __name__ == "__main__":
    main()

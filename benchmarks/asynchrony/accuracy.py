"""What asynchrony costs, and what wins it back: 1 to 8 nodes at equal samples, as Campos et al., ICCS 2017, trained.

    python benchmarks/asynchrony/accuracy.py [--seeds 3] [--rate 0.05] [--images 4000] [--epochs 2] [--out DIR]

Real gradients of `lenet5` on the first Fashion-MNIST images, in virtual time on the ready cluster `bsc`: the same rate,
the same batch a worker and the same number of images in all, however many nodes. A worker is a node.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from study import Outcome, job_of, run, spread

from polyrhythm.simulation.cluster_file import open_cluster

NODES = (1, 2, 4, 8)
REMEDIES = ("synchronous", "ssp(s=1)", "staleness_aware", "dc_asgd(variant=c)", "dc_asgd")


def trials(strategy: str, nodes: int, chosen: argparse.Namespace) -> list[Outcome | None]:
    """Trains with every seed."""
    found = []
    for seed in range(chosen.seeds):
        options = {
            "data": "fashion-mnist",
            "model": "lenet5",
            "strategy": strategy,
            "workers": nodes,
            "optimizer": f"sgd(lr={chosen.rate}, momentum=0)",
            "schedule": "constant",
            "batch_size": 32,
            "epochs": chosen.epochs,
            "seed": seed,
        }
        job = job_of(options, chosen.images, 1000)
        found.append(run(job, open_cluster("bsc"), chosen.loss))
    return found


HEAD = (
    "| strategy | nodes | images/s | speed-up | efficiency | seconds to the loss | top-1 | staleness |\n"
    "|---|---|---|---|---|---|---|---|"
)


def line(strategy: str, nodes: int, found: list[Outcome | None], alone: list[Outcome]) -> str:
    """A row as Markdown."""
    ended = [entry for entry in found if entry is not None]
    if not ended:
        return f"| `{strategy}` | {nodes} | | | | | diverged, all {len(found)} | |"
    speed = sum(entry.images_per_s for entry in ended) / len(ended)
    speedup = speed / (sum(entry.images_per_s for entry in alone or ended) / len(alone or ended))
    reached = [entry.target_s for entry in ended if entry.target_s is not None]
    in_time = f"{spread(reached, 0)}" if reached else "never"
    if reached and len(reached) < len(found):
        in_time += f" ({len(reached)} of {len(found)})"
    top1 = spread([100 * entry.top1 for entry in ended])
    diverged = f" ({len(found) - len(ended)} diverged)" if len(ended) < len(found) else ""
    return (
        f"| `{strategy}` | {nodes} | {speed:.1f} | {speedup:.2f} | {speedup / nodes:.2f} | {in_time} "
        f"| {top1} %{diverged} | {sum(entry.staleness for entry in ended) / len(ended):.1f} |"
    )


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--rate", type=float, default=0.05)
    options.add_argument("--images", type=int, default=4000)
    options.add_argument("--epochs", type=int, default=2)
    options.add_argument("--loss", type=float, default=0.8)
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    began, lines = time.perf_counter(), [HEAD]
    print(HEAD, flush=True)
    alone: list[Outcome] = []
    cases = [("parameter_server", nodes) for nodes in NODES] + [(remedy, NODES[-1]) for remedy in REMEDIES]
    for strategy, nodes in cases:
        found = trials(strategy, nodes, chosen)
        lines.append(line(strategy, nodes, found, alone))
        alone = alone or [entry for entry in found if entry is not None]
        print(lines[-1], flush=True)
    if chosen.out is not None:
        command = " ".join(["python", *sys.argv])
        facts = f"`{command}`: {chosen.seeds} seeds, {time.perf_counter() - began:.0f} s, torch "
        facts += f"{torch.__version__}; loss {chosen.loss:g}."
        (chosen.out / "accuracy.md").write_text("\n".join([facts, "", *lines]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

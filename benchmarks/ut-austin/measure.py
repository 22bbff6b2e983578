"""UT Austin's experiment: Downpour SGD and DC-ASGD on 4, 8 and 12 workers with one server, in seconds an epoch.

    python benchmarks/ut-austin/measure.py [--seeds 3] [--steps 352] [--real] [--beside] [--out benchmarks/ut-austin]

In virtual time on the ready cluster `ut_austin`, with real gradients; and, with `--real`, in real processes on this
machine. Every worker takes as many steps in an epoch, however many workers there are, as theirs do.

`--beside` takes their machines as they say: of 4, 8 and 12, one is the server, and 3, 7 and 11 are workers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "asynchrony"))

from study import job_of, spread

from polyrhythm.events import Event, RunEnded
from polyrhythm.launch.children import run_local
from polyrhythm.roles.job import Job
from polyrhythm.simulation.cluster import open_cluster
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import simulate_on

PAPER_S = {"downpour": {4: 3.52, 8: 3.53, 12: 3.55}, "dc_asgd": {4: 3.59, 8: 3.61, 12: 3.64}}
IMAGES, BATCH = 1408, 16


def job(strategy: str, workers: int, steps: int, seed: int) -> Job:
    """Makes the run in which every worker takes so many steps: as many passes over the digits as there are workers."""
    options = {
        "data": "digits",
        "model": "mlp(hidden=[64, 64], dropout=0.2)",
        "strategy": f"{strategy}(placement=dedicated)",
        "workers": workers,
        "optimizer": "sgd(lr=0.02, momentum=0, weight_decay=0.0001)",
        "schedule": "constant",
        "batch_size": BATCH,
        "seed": seed,
    }
    made = job_of(options, IMAGES, 1000)
    epochs = round(steps / made.steps_per_epoch)
    return replace(made, learning=replace(made.learning, epochs=epochs))


def result_of(play: Callable[[Callable[[Event], None]], Any]) -> dict[str, Any]:
    """Plays a run; gives its figures."""
    found: dict[str, Any] = {}

    def hear(event: Event) -> None:
        if isinstance(event, RunEnded):
            found.update(event.result)

    play(hear)
    return found


def simulated(made: Job) -> dict[str, Any]:
    """Trains on their cluster, where need be with a thirteenth machine, so that the server has one of its own."""
    known = open_cluster("ut_austin")
    hosts = [host.model_copy(update={"count": host.count + 1}) for host in known.hosts]
    cluster = known.model_copy(update={"hosts": hosts})
    layout = lay_out(
        cluster,
        made.workers,
        made.strategy.traits(made.workers).servers,
        made.strategy.traits(made.workers).placement,
    )
    return result_of(lambda hear: simulate_on(layout, made, hear))


def real(made: Job) -> dict[str, Any]:
    """Trains in processes of this machine, one thread each."""
    return result_of(lambda hear: run_local(made, hear, threads=1))


def measured(strategy: str, machines: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """Makes a line of the table."""
    trials, workers = [], machines - 1 if chosen.beside else machines
    for seed in range(chosen.seeds):
        made = job(strategy, workers, chosen.steps, seed)
        virtual = simulated(made)
        trials.append((_epoch_s(virtual, made, chosen.steps), 100 * virtual["test_top1"]))
    row: dict[str, Any] = {
        "strategy": strategy,
        "workers": workers,
        "paper_s": PAPER_S[strategy][machines],
        "simulated_s": spread([epoch_s for epoch_s, _ in trials], 3),
        "top1": spread([top1 for _, top1 in trials]),
        "seconds": statistics.mean(epoch_s for epoch_s, _ in trials),
    }
    if chosen.real:
        made = job(strategy, workers, chosen.steps, 0)
        here = real(made)
        row |= {"real_s": _epoch_s(here, made, chosen.steps), "real_top1": 100 * here["test_top1"]}
    return row


def _epoch_s(result: dict[str, Any], made: Job, steps: int) -> float:
    """Return the seconds of `steps` steps of every worker, without start-up and tests."""
    images = IMAGES * made.learning.epochs
    return float(images / result["images_per_s"] * steps / result["steps"])


HEAD = (
    "| strategy | workers | theirs | simulated | against the first | theirs | top-1, simulated | real, here "
    "| top-1, real |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def line(row: dict[str, Any], first: dict[str, Any]) -> str:
    """A row as Markdown."""
    cells = [
        f"`{row['strategy']}`",
        row["workers"],
        f"{row['paper_s']:.2f} s",
        f"{row['simulated_s']} s",
        f"{100 * (row['seconds'] / first['seconds'] - 1):+.1f} %",
        f"{100 * (row['paper_s'] / first['paper_s'] - 1):+.1f} %",
        f"{row['top1']} %",
        f"{row['real_s']:.2f} s" if "real_s" in row else "",
        f"{row['real_top1']:.1f} %" if "real_s" in row else "",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--steps", type=int, default=352)
    options.add_argument("--real", action="store_true")
    options.add_argument("--beside", action="store_true", help="one of their machines is the server")
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    print(HEAD, flush=True)
    began, lines, rows = time.perf_counter(), [], []
    for strategy, known in PAPER_S.items():
        first: dict[str, Any] = {}
        for machines in known:
            row = measured(strategy, machines, chosen)
            first = first or row
            rows.append(row)
            lines.append(line(row, first))
            print(lines[-1], flush=True)
    if chosen.out is not None:
        command = " ".join(["python", *sys.argv])
        facts = f"`{command}`: {chosen.seeds} seeds, {time.perf_counter() - began:.0f} s on {os.cpu_count()} cores "
        facts += f"({platform.machine()}), torch {torch.__version__}."
        name = "results_beside" if chosen.beside else "results"
        (chosen.out / f"{name}.md").write_text("\n".join([facts, "", HEAD, *lines]) + "\n", encoding="utf-8")
        (chosen.out / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

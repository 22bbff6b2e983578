"""The shape of table 3 of Campos et al., ICCS 2017: more nodes, more steps to a loss, and yet less time.

    python benchmarks/bsc-tables/convergence.py [--rate 0.3] [--loss 0.2] [--seeds 5] [--nodes 1,2,4,8] [--out DIR]

Real gradients of a small network on the ready cluster `bsc`, mixed mode, as many servers as they had, their optimizer,
and the same rate and batch a worker on any number of nodes. A step is one gradient of one worker.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.events import Evaluated, Event, WorkerProgress
from polyrhythm.roles.job import CheckpointConfig
from polyrhythm.roles.world import StopRequest
from polyrhythm.simulation.cluster import open_cluster
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import simulate_on

SERVERS = {1: 1, 2: 1, 4: 3, 8: 7}
"""By nodes, as in their table 2; they say nothing of servers on 1 node, which needs none."""

PAPER_SPEEDUPS = {1: 1.00, 2: 1.69, 4: 2.80, 8: 4.73}
PAPER_TOP1 = {1: 0.228, 2: 0.217, 4: 0.202, 8: 0.217}
WINDOW = 40
"""Steps of all workers whose mean training loss must be down to the target."""

EPOCHS = 60
BATCH = 32


@dataclass(frozen=True)
class Reached:
    """What it took until the loss was there: steps of all workers, virtual seconds, and top-1 of the last test."""

    steps: int
    seconds: float
    top1: float


class Watch:
    """Watches the training loss of all workers' steps, and wishes to stop when it is down to the target.

    Attributes:
        stop: the wish.
        reached: None until then.
    """

    def __init__(self, loss: float) -> None:
        self.stop = StopRequest()
        self.reached: Reached | None = None
        self._target = loss
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._steps = 0
        self._top1 = math.nan

    def on_event(self, event: Event) -> None:
        if isinstance(event, Evaluated) and self.reached is None:
            self._top1 = event.test_top1
        if not isinstance(event, WorkerProgress) or self.reached is not None:
            return
        self._steps += event.steps
        self._losses.extend([event.loss] * event.steps)
        if len(self._losses) == WINDOW and statistics.mean(self._losses) <= self._target:
            self.reached = Reached(self._steps, event.time_s, self._top1)
            self.stop.request()


def train(nodes: int, rate: float, loss: float, seed: int) -> Reached | None:
    """Trains on some nodes until the loss is there; None if it never is."""
    options = {
        "data": "digits",
        "model": "mlp",
        "strategy": f"mixed(replicas=1, servers={SERVERS[nodes]})",
        "workers": nodes,
        "optimizer": f"tf1_rmsprop(lr={rate})",
        "schedule": "constant",
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "seed": seed,
    }
    job = assemble(configure(options), CheckpointConfig(checkpoints=0))
    layout = lay_out(open_cluster("bsc"), nodes, SERVERS[nodes], job.strategy.traits(nodes).placement)
    watch = Watch(loss)
    simulate_on(layout, job, watch.on_event, stop=watch.stop)
    return watch.reached


def row(nodes: int, found: list[Reached], alone: list[Reached]) -> dict[str, object]:
    """Makes a line of the table; speed-ups are those of the means."""
    steps, seconds = [entry.steps for entry in found], [entry.seconds for entry in found]
    return {
        "nodes": nodes,
        "steps": statistics.mean(steps),
        "steps_deviation": statistics.stdev(steps) if len(steps) > 1 else 0.0,
        "seconds": statistics.mean(seconds),
        "speedup": statistics.mean(entry.seconds for entry in alone) / statistics.mean(seconds),
        "paper_speedup": PAPER_SPEEDUPS[nodes],
        "top1": statistics.mean(entry.top1 for entry in found),
        "top1_deviation": statistics.stdev(entry.top1 for entry in found) if len(found) > 1 else 0.0,
        "paper_top1": PAPER_TOP1[nodes],
        "trials": [asdict(entry) for entry in found],
    }


HEAD = (
    "| nodes | steps to the loss (mean ± deviation) | virtual seconds | speed-up | paper's speed-up "
    "| top-1 of the last test before | paper's final top-1 |\n|---|---|---|---|---|---|---|"
)


def line(entry: dict[str, object]) -> str:
    """A row as Markdown."""
    return (
        f"| {entry['nodes']} | {entry['steps']:.0f} ± {entry['steps_deviation']:.0f} | {entry['seconds']:.0f} "
        f"| {entry['speedup']:.2f} | {entry['paper_speedup']:.2f} "
        f"| {100 * entry['top1']:.1f} ± {100 * entry['top1_deviation']:.1f} % | {100 * entry['paper_top1']:.1f} % |"
    )


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rate", type=float, default=0.3)
    options.add_argument("--loss", type=float, default=0.2)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument(
        "--nodes", type=lambda text: [int(part) for part in text.split(",")], default=[*SERVERS]
    )
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    print(HEAD, flush=True)
    rows: list[dict[str, object]] = []
    alone: list[Reached] = []
    for nodes in chosen.nodes:
        tries = [train(nodes, chosen.rate, chosen.loss, seed) for seed in range(chosen.seeds)]
        found = [entry for entry in tries if entry is not None]
        if len(found) < len(tries):
            print(
                f"{nodes} nodes: {len(tries) - len(found)} of {len(tries)} trials never got there",
                file=sys.stderr,
            )
        if not found:
            continue
        alone = alone or found
        rows.append(row(nodes, found, alone))
        print(line(rows[-1]), flush=True)
    if chosen.out is not None:
        chosen.out.mkdir(parents=True, exist_ok=True)
        facts = {"command": " ".join(["python", *sys.argv]), "torch": torch.__version__, "rows": rows}
        (chosen.out / "convergence.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        text = "\n".join([HEAD, *map(line, rows)])
        (chosen.out / "convergence.md").write_text(f"`{facts['command']}`\n\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

"""Figures 1, 2a, 2b and 3 of Campos et al., ICCS 2017, out of the simulator.

    python benchmarks/bsc-tables/figures.py [--steps 60] [--out benchmarks/bsc-tables]

Figures 1 and 2 are dry runs of ResNet-50 on `bsc` and `bsc_gpus`, which were told two rates: 124.18 images/s of one
node, and 292.22 of four with one server. Figure 3 trains the `mlp` on `digits` with real gradients on `bsc`, as
`convergence.py` does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what benchmarks share

from by_verb import PAPER, images_per_s, options_of
from convergence import SERVERS, WINDOW

from paper_figures import bars, curve, figure, write
from polyrhythm import simulate
from polyrhythm.events import WorkerProgress
from polyrhythm.reporting.event_log import LOG_FILE, read_events

SETUPS = ((1, 0), (2, 1), (4, 1), (4, 2), (4, 3), (8, 1), (8, 3), (8, 7))
DEDICATED = ((4, 1), (4, 2), (4, 3))
LEARNT = {
    "data": "digits",
    "model": "mlp",
    "optimizer": "tf1_rmsprop(lr=0.3)",
    "schedule": "constant",
    "batch_size": 32,
}


def inside_a_node(steps: int) -> list[tuple[int, float]]:
    """Gives images a second of 1 to 4 GPUs of a node, in step, 32 images each."""
    common = {key: value for key, value in options_of(1, 0, 4).items() if key not in ("workers", "strategy")}
    return [
        (gpus, images_per_s({**common, "strategy": "synchronous", "workers": gpus}, steps))
        for gpus in range(1, 5)
    ]


def set_ups(steps: int) -> list[tuple[str, float, float | None]]:
    """Gives the name of every set-up, its rate, and the paper's."""
    found = []
    for nodes, servers in SETUPS:
        name = f"{nodes} nodes, {servers} servers" if servers else "1 node"
        found.append(
            (name, images_per_s(options_of(nodes, servers, 1), steps), PAPER.get((nodes, servers, False)))
        )
    for workers, servers in DEDICATED:
        options = options_of(workers, servers, 1, dedicated=True)
        told = PAPER.get((workers, servers, True))
        found.append((f"{workers} + {servers} nodes", images_per_s(options, steps), told))
    return found


def losses(run: Path) -> list[tuple[float, float]]:
    """Gives the mean training loss of some steps of all workers over seconds, at most sixty points."""
    events = read_events(run / LOG_FILE)
    told = [
        (event.time_s, event.loss) for event in events if isinstance(event, WorkerProgress) and event.images
    ]
    points = [
        (told[end - 1][0], sum(loss for _, loss in told[max(0, end - WINDOW) : end]) / min(WINDOW, end))
        for end in range(WINDOW, len(told) + 1)
    ]
    return points[:: max(1, len(points) // 60)]


def loss_over_time(folder: Path) -> dict[int, list[tuple[float, float]]]:
    """Trains on 1, 2, 4 and 8 nodes for 500 steps of all workers; gives the training loss over virtual seconds."""
    found = {}
    for nodes, servers in SERVERS.items():
        run = folder / str(nodes)
        simulate(
            cluster="bsc",
            strategy=f"mixed(replicas=1, servers={servers})",
            workers=nodes,
            epochs=10,
            out=run,
            **LEARNT,
        )
        found[nodes] = losses(run)
    return found


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    inside = inside_a_node(chosen.steps)
    lines = ["| GPUs of a node | images/s | speed-up |", "|---|---|---|"]
    lines += [f"| {gpus} | {rate:.1f} | {rate / inside[0][1]:.2f} |" for gpus, rate in inside]
    shown = set_ups(chosen.steps)
    lines += ["", "| set-up | simulated, images/s | paper |", "|---|---|---|"]
    lines += [f"| {name} | {rate:.1f} | {told or ''} |" for name, rate, told in shown]
    print("\n".join(lines), flush=True)
    rates = {name: rate for name, rate, _ in shown}
    nodes = [(1, "1 node"), (2, "2 nodes, 1 servers"), (4, "4 nodes, 3 servers"), (8, "8 nodes, 7 servers")]
    with tempfile.TemporaryDirectory() as folder:
        fallen = loss_over_time(Path(folder))
    lines += ["", "| nodes | virtual seconds to a training loss of 0.5 | 0.2 |", "|---|---|---|"]
    for count, points in fallen.items():
        first = [
            next((seconds for seconds, loss in points if loss <= goal), float("nan")) for goal in (0.5, 0.2)
        ]
        lines.append(f"| {count} | {first[0]:.0f} | {first[1]:.0f} |")
    print("\n".join(lines[-7:]), flush=True)
    if chosen.out is None:
        return
    drawn = [
        figure(
            "Figure 1",
            [
                bars([name for name, _, _ in shown], [rate for _, rate, _ in shown], "simulated"),
                bars(
                    [name for name, _, told in shown if told],
                    [told for _, _, told in shown if told],
                    "paper",
                    1,
                ),
            ],
            "",
            "images/s",
            barmode="group",
        ),
        figure(
            "Figure 2a",
            [
                curve("simulated", [(gpus, rate / inside[0][1]) for gpus, rate in inside]),
                curve("ideal", [(1, 1), (4, 4)], dashed=True, marks=False),
            ],
            "GPUs of a node",
            "speed-up",
        ),
        figure(
            "Figure 2b",
            [
                curve("simulated", [(count, rates[name] / rates["1 node"]) for count, name in nodes]),
                curve("paper", [(1, 1), (2, 195.60 / 124.18), (4, 374.73 / 124.18), (8, 809.10 / 124.18)], 1),
                curve("ideal", [(1, 1), (8, 8)], dashed=True, marks=False),
            ],
            "nodes",
            "speed-up",
        ),
        figure(
            "Figure 3",
            [
                curve(f"{count} node{'s' * (count != 1)}", points, index, marks=False)
                for index, (count, points) in enumerate(fallen.items())
            ],
            "virtual seconds",
            "training loss",
        ),
    ]
    write(chosen.out, "figures", drawn, {"torch": torch.__version__}, "\n".join(lines))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

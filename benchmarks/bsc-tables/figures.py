"""Figures 1, 2a, 2b and 3 of Campos et al., ICCS 2017, out of the simulator, and small ones of real runs.

    python benchmarks/bsc-tables/figures.py [--steps 60] [--real] [--out benchmarks/bsc-tables]

Figures 1 and 2 are dry runs of ResNet-50 on `bsc` and `bsc_gpus`, which were told two rates: 124.18 images/s of one
node, and 292.22 of four with one server. Figure 3 trains the `mlp` on `digits` with real gradients on `bsc`, as
`convergence.py` does. `--real` trains the same network with one and two processes of this machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what benchmarks share

from by_verb import PAPER, images_per_s, options_of
from convergence import SERVERS, WINDOW

from paper_figures import bars, curve, figure, write
from polyrhythm import simulate, train
from polyrhythm.events import WorkerProgress
from polyrhythm.reporting.event_log import LOG_FILE, read_events

SETUPS = ((1, 0), (2, 1), (4, 1), (4, 2), (4, 3), (8, 1), (8, 3), (8, 7))
DEDICATED = ((4, 1), (4, 2), (4, 3))
REAL_STEPS = 600
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
        found.append((name, images_per_s(options_of(nodes, servers, 1), steps), PAPER.get((nodes, servers))))
    for workers, servers in DEDICATED:
        options = options_of(workers, servers, 1)
        options["strategy"] = f"mixed(replicas=1, servers={servers}, placement=dedicated)"
        told = 396.62 if (workers, servers) == (4, 3) else None
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


def real(folder: Path) -> dict[int, tuple[float, list[tuple[float, float]]]]:
    """Trains with one and two processes of this machine; gives images a second, and the training loss over seconds."""
    found = {}
    for workers in (1, 2):
        run = folder / f"real-{workers}"
        options: dict[str, Any] = {
            **LEARNT,
            "data": "fashion-mnist",
            "model": "lenet5",
            "optimizer": "sgd(lr=0.05)",
        }
        done = train(
            strategy="synchronous",
            workers=workers,
            updates=REAL_STEPS,
            out=run,
            start_method="fork",
            **options,
        )
        assert done is not None
        found[workers] = float(done.figures["images_per_s"]), losses(run)
    return found


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--real", action="store_true")
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
        measured = real(Path(folder)) if chosen.real else {}
    lines += ["", "| nodes | virtual seconds to a training loss of 0.5 | 0.2 |", "|---|---|---|"]
    for count, points in fallen.items():
        first = [
            next((seconds for seconds, loss in points if loss <= goal), float("nan")) for goal in (0.5, 0.2)
        ]
        lines.append(f"| {count} | {first[0]:.0f} | {first[1]:.0f} |")
    if measured:
        lines += ["", "| real processes | images/s | speed-up |", "|---|---|---|"]
        lines += [
            f"| {count} | {rate:.0f} | {rate / measured[1][0]:.2f} |" for count, (rate, _) in measured.items()
        ]
    print("\n".join(lines[-12:]), flush=True)
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
    if measured:
        drawn.append(
            figure(
                "Figure 3 real",
                [
                    curve(f"{count} process{'es' * (count != 1)}", points, index, marks=False)
                    for index, (count, (_, points)) in enumerate(measured.items())
                ],
                "seconds",
                "training loss",
            )
        )
    write(chosen.out, "figures", drawn, {"torch": torch.__version__}, "\n".join(lines))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

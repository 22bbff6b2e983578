"""The consistency dial: accuracy and throughput from lockstep through bounded staleness to free-running.

    python benchmarks/asynchrony/dial.py [--seeds 3] [--workers 8] [--rate 0.1] [--epochs 8] [--out DIR]

Real gradients of the `mlp` on `digits` in virtual time: 8 even hosts whose steps are spread by 0.7 (log-normal: one in
twenty takes three times the median or more), so that somebody is always late. The same batch, images and rate of a
gradient for all; the synchronous server, which takes the mean of 8 gradients for one update, has 8 times the rate.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from study import Outcome, job_of, run, spread

from polyrhythm.simulation.cluster import Cluster

DIAL = {
    "synchronous": "synchronous",
    **{f"s = {s}": f"bounded_staleness(s={s})" for s in (1, 2, 4, 8)},
    "asynchronous": "asynchronous",
}


@dataclass(frozen=True)
class Point:
    """One setting of the dial, of all seeds: its name, images/s, top-1 in percent and mean staleness."""

    name: str
    speeds: list[float]
    top1: list[float]
    staleness: float


def cluster(workers: int) -> Cluster:
    """Makes the hosts, and one for the server."""
    link = {"latency_s": 1e-4, "bandwidth_bytes_per_s": 1e9}
    hosts = [
        {"name": "even", "count": workers, "cores": 4},
        {"name": "server", "count": 1, "cores": 4},
    ]
    return Cluster(
        name="stragglers", hosts=hosts, nic=link, inside=link, step_time="log_normal(median=0.01, sigma=0.7)"
    )


def point(name: str, chosen: argparse.Namespace) -> Point:
    """Trains with every seed."""
    found: list[Outcome] = []
    rate = chosen.rate * (chosen.workers if name == "synchronous" else 1)
    for seed in range(chosen.seeds):
        options = {
            "data": "digits",
            "model": "mlp",
            "strategy": f"parameter_server(consistency={DIAL[name]}, placement=dedicated)",
            "workers": chosen.workers,
            "optimizer": f"sgd(lr={rate}, momentum=0)",
            "schedule": "constant",
            "batch_size": 16,
            "epochs": chosen.epochs,
            "seed": seed,
        }
        outcome = run(job_of(options), cluster(chosen.workers))
        if outcome is not None:
            found.append(outcome)
    return Point(
        name,
        [outcome.images_per_s for outcome in found],
        [100 * outcome.top1 for outcome in found],
        statistics.mean(outcome.staleness for outcome in found),
    )


HEAD = "| setting | images/s | top-1 | staleness |\n|---|---|---|---|"


def line(found: Point) -> str:
    """A row as Markdown."""
    return f"| {found.name} | {spread(found.speeds, 0)} | {spread(found.top1)} % | {found.staleness:.1f} |"


def picture(points: list[Point]) -> str:
    """Draws accuracy over throughput, as SVG."""
    wide, high, edge = 640, 400, 60
    xs = [statistics.mean(entry.speeds) for entry in points]
    ys = [statistics.mean(entry.top1) for entry in points]
    left, right = 0.0, 1.1 * max(xs)
    low, top = min(ys) - 2, max(ys) + 2

    def place(x: float, y: float) -> tuple[float, float]:
        across = edge + (x - left) / (right - left) * (wide - 2 * edge)
        return across, high - edge - (y - low) / (top - low) * (high - 2 * edge)

    spots = [place(x, y) for x, y in zip(xs, ys, strict=True)]
    path = " ".join(f"{x:.0f},{y:.0f}" for x, y in spots)
    marks = "".join(
        f'<circle cx="{x:.0f}" cy="{y:.0f}" r="5" fill="#1f77b4"/>'
        f'<text x="{x + 8:.0f}" y="{y - 8:.0f}">{entry.name}</text>'
        for entry, (x, y) in zip(points, spots, strict=True)
    )
    axes = f'<path d="M{edge} {edge}V{high - edge}H{wide - edge}" fill="none" stroke="#444"/>'
    ticks = "".join(
        f'<text x="{place(right * part / 4, low)[0]:.0f}" y="{high - edge + 18}" text-anchor="middle">'
        f"{right * part / 4:.0f}</text>"
        for part in range(5)
    ) + "".join(
        f'<text x="{edge - 6}" y="{place(0, low + (top - low) * part / 4)[1]:.0f}" text-anchor="end">'
        f"{low + (top - low) * part / 4:.1f}</text>"
        for part in range(5)
    )
    titles = (
        f'<text x="{wide / 2:.0f}" y="{high - 12}" text-anchor="middle">images/s, virtual</text>'
        f'<text x="14" y="{edge - 20}">test top-1, %</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
        'font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>{axes}{ticks}{titles}'
        f'<polyline points="{path}" fill="none" stroke="#1f77b4" stroke-opacity=".4"/>{marks}</svg>\n'
    )


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--workers", type=int, default=8)
    options.add_argument("--rate", type=float, default=0.1)
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    began, lines, points = time.perf_counter(), [HEAD], []
    print(HEAD, flush=True)
    for name in DIAL:
        points.append(point(name, chosen))
        lines.append(line(points[-1]))
        print(lines[-1], flush=True)
    if chosen.out is not None:
        command = " ".join(["python", *sys.argv])
        facts = f"`{command}`: {chosen.seeds} seeds, {time.perf_counter() - began:.0f} s, torch "
        facts += f"{torch.__version__}."
        (chosen.out / "dial.md").write_text("\n".join([facts, "", *lines]) + "\n", encoding="utf-8")
        (chosen.out / "dial.svg").write_text(picture(points), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

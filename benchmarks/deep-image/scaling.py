"""Figures 2 to 4 of Wu et al., "Deep Image", arXiv 1501.02876, out of the simulator.

    python benchmarks/deep-image/scaling.py [--calibrate] [--readings] [--seeds 3] [--jobs 2] [--out DIR]

Told to the simulator: the ready cluster `deep_image`, and a network of 8 convolutional and 3 fully connected layers
(`vgg11`; they do not name their widths). A node's four GPUs are one worker, and what they exchange among themselves
costs nothing. One number of the cluster is calibrated, and `--calibrate` finds it again: what a node's InfiniBand
carries, so that 64 GPUs with a mini-batch of 1024 are 47 times as fast as one. All else is predicted: hybrid against
data parallelism (figure 2), other numbers of GPUs and other mini-batches (figure 3), and the time to 80 % (figure 4).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import brentq

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what benchmarks share

from paper_figures import curve, figure, write
from polyrhythm.api.simulate import simulate
from polyrhythm.reporting.comparison import read_run
from polyrhythm.simulation.cluster import Cluster, Link, open_cluster

MODEL, DATA = "vgg11", "synthetic(classes=1000, size=224)"
GPUS = (4, 8, 16, 32, 64)
A_NODE = 4
BATCHES = (256, 512, 1024)
KNOWN = open_cluster("deep_image")
assert KNOWN.step_of is not None
assert KNOWN.step_of.share_of_peak is not None
SHARE = KNOWN.step_of.share_of_peak
HYBRID = "hybrid(collective=direct)"
PAPER_SPEED_UP, PAPER_TIME = 47.0, 24.7
STEPS = 8


@dataclass(frozen=True)
class Way:
    """How their data parallelism is read.

    Attributes:
        told: of it, for the table.
        strategy: its spec.
        gpus: that are one worker.
    """

    told: str
    strategy: str
    gpus: int


LAZY = Way(
    "lazy update, a node a worker",
    "lazy_synchronous(collective=direct, bucket_bytes=33554432, piece_bytes=67108864)",
    A_NODE,
)
"""Each layer's gradients travel while others are computed, also into the next step (their section 3.1)."""
BUTTERFLY = "synchronous(collective=direct, bucket_bytes=1073741824)"
"""\"At the end of gradient computation, GPU k receives the k-th part from all other GPUs\" (3.1): all at once."""
OTHERS = (Way("butterfly at the end, a node a worker", BUTTERFLY, A_NODE),)


def cluster_of(way: Way, share: float, bandwidth: float) -> Cluster:
    """Gives their machines with a share of the peak, and so many bytes a second of a node's link."""
    assert KNOWN.step_of is not None
    nic = Link(latency_s=KNOWN.nic.latency_s, bandwidth_bytes_per_s=bandwidth)
    hosts = (KNOWN.hosts[0].model_copy(update={"workers": A_NODE // way.gpus, "speed": float(way.gpus)}),)
    of = KNOWN.step_of.model_copy(update={"share_of_peak": share})
    values = {name: getattr(KNOWN, name) for name in Cluster.model_fields}
    return Cluster(**{**values, "hosts": hosts, "nic": nic, "step_of": of})


Point = tuple[Way, str, int, int, float, float]
"""Way, strategy, GPUs, images of each, share of the peak, bytes a second of a node's link."""


def images_per_s(point: Point) -> float:
    """Gives the rate of so many GPUs with a batch each."""
    way, strategy, gpus, batch, share, bandwidth = point
    workers = gpus // way.gpus
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(
            cluster=cluster_of(way, share, bandwidth),
            gradients="none",
            data=DATA,
            model=MODEL,
            strategy=strategy if workers > 1 else "synchronous",
            workers=workers,
            batch_size=batch * way.gpus,
            steps=STEPS,
            out=Path(folder) / "run",
        )
    return float(run.figures["sustained_images_per_s"])


def of_one(share: float, batch: int) -> float:
    """Gives the rate of one GPU with a mini-batch, which waits for nobody: a quarter of a node's that is one worker."""
    return images_per_s((LAZY, LAZY.strategy, A_NODE, batch // A_NODE, share, 1e9)) / A_NODE


def calibrated(way: Way, share: float) -> float:
    """Finds the bandwidth of a node's link at which 64 GPUs are 47 times as fast as one, in bytes/s."""
    alone = of_one(share, 1024)

    def above(log_bandwidth: float) -> float:
        rate = images_per_s((way, way.strategy, 64, 16, share, math.exp(log_bandwidth)))
        return rate / alone - PAPER_SPEED_UP

    return math.exp(brentq(above, math.log(5e8), math.log(6e10), xtol=0.01))


def crossover(
    way: Way, share: float, bandwidth: float, pool: ProcessPoolExecutor
) -> list[tuple[int, float, float]]:
    """Gives, with 64 images a GPU, the images a second of data and hybrid parallelism, by the number of GPUs."""
    points = [(way, how, gpus, 64, share, bandwidth) for gpus in GPUS[1:] for how in (way.strategy, HYBRID)]
    rates = list(pool.map(images_per_s, points))
    return list(zip(GPUS[1:], rates[::2], rates[1::2], strict=True))


def learning(workers: int, seed: int) -> list[tuple[float, float]]:
    """Trains a small `deep_image` on digits with one mini-batch of 128 shared by so many; gives top-1 over images."""
    with tempfile.TemporaryDirectory() as folder:
        simulate(
            cluster="deep_image",
            data="digits",
            model="deep_image(width=16, hidden=32, dropout=0.0)",
            strategy="lazy_synchronous",
            workers=workers,
            batch_size=128 // workers,
            epochs=12,
            optimizer="sgd(lr=0.05, momentum=0.9)",
            schedule="constant",
            seed=seed,
            out=Path(folder) / "run",
        )
        return [(test.images, test.event.test_top1) for test in read_run(Path(folder) / "run").tests]


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--calibrate", action="store_true", help="find what a node's link carries")
    options.add_argument("--readings", action="store_true", help="compare other shares of the peak")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    share = SHARE
    with ProcessPoolExecutor(chosen.jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        readings = [(LAZY, 0.25), (LAZY, 0.75), *((way, share) for way in OTHERS)] if chosen.readings else []
        again = [(LAZY, share)] if chosen.calibrate else []
        fits = {each: pool.submit(calibrated, *each) for each in (*again, *readings)}
        learned = {
            (workers, seed): pool.submit(learning, workers, seed)
            for workers in (1, 16, 32)
            for seed in range(chosen.seeds)
        }
        known = KNOWN.nic.bandwidth_bytes_per_s
        bandwidth = fits[LAZY, share].result() if chosen.calibrate else known
        points = [
            (LAZY, LAZY.strategy, gpus, batch // gpus, share, bandwidth) for batch in BATCHES for gpus in GPUS
        ]
        rate_of = dict(zip(points, pool.map(images_per_s, points), strict=True))
        crossed = crossover(LAZY, share, bandwidth, pool)
        others = []
        for way, other in readings:
            fitted = fits[way, other].result()
            half = images_per_s((way, way.strategy, 32, 32, other, fitted)) / of_one(other, 1024)
            others.append((way, other, fitted, half, crossover(way, other, fitted, pool)))
        curves = {
            workers: [learned[workers, seed].result() for seed in range(chosen.seeds)]
            for workers in (1, 16, 32)
        }
    alone_at = {batch: rate_of[points[place * len(GPUS)]] / A_NODE for place, batch in enumerate(BATCHES)}
    grown = {
        batch: [
            (
                gpus,
                rate_of[LAZY, LAZY.strategy, gpus, batch // gpus, share, bandwidth] / alone_at[batch],
            )
            for gpus in GPUS
        ]
        for batch in BATCHES
    }
    rates = {1: alone_at[1024]} | {gpus: grown_by * alone_at[1024] for gpus, grown_by in grown[1024]}
    lines = [
        f"calibrated: a node's link carries {bandwidth / 1e9:.2f} GB/s, at {100 * share:.0f} % of the GPUs' peak",
        "",
        "| GPUs | " + " | ".join(f"speed-up, mini-batch {batch}" for batch in BATCHES) + " |",
        "|---" * (1 + len(BATCHES)) + "|",
    ]
    for place, gpus in enumerate(GPUS):
        lines.append(f"| {gpus} | " + " | ".join(f"{grown[batch][place][1]:.1f}" for batch in BATCHES) + " |")
    print("\n".join(lines), flush=True)
    more = ["", "| GPUs, 64 images each | data parallel, images/s | hybrid, images/s |", "|---|---|---|"]
    more += [f"| {gpus} | {data:.0f} | {hybrid:.0f} |" for gpus, data, hybrid in crossed]
    more += [
        "",
        "| GPUs | images to 80 % (seeds) | against one GPU | time, against one GPU | paper |",
        "|---|---|---|---|---|",
    ]
    needed = {
        workers: [next((images for images, top1 in found if top1 >= 0.8), float("nan")) for found in each]
        for workers, each in curves.items()
    }
    alone = statistics.mean(needed[1])
    for workers, found in needed.items():
        images = statistics.mean(found)
        faster = alone / images * rates[workers] / rates[1]
        more.append(
            f"| {workers} | {', '.join(map(str, found))} | {images / alone:.2f} | {faster:.1f} | "
            f"{PAPER_TIME if workers == 32 else ''} |"
        )
    print("\n".join(more), flush=True)
    lines += more
    if others:
        more = [
            "",
            "| data parallelism | share of the peak | calibrated | 32 GPUs, mini-batch 1024 | "
            + " | ".join(f"hybrid / data, {gpus} GPUs" for gpus in GPUS[1:])
            + " |",
            "|---" * (4 + len(GPUS[1:])) + "|",
        ]
        for way, other, fitted, half, found_there in others:
            against = " | ".join(f"{hybrid / data:.2f}" for _, data, hybrid in found_there)
            more.append(f"| {way.told} | {other} | {fitted / 1e9:.2f} GB/s | {half:.1f} | {against} |")
        print("\n".join(more), flush=True)
        lines += more
    if chosen.out is None:
        return
    drawn = [
        figure(
            "Figure 2",
            [
                curve("data parallelism", [(gpus, data) for gpus, data, _ in crossed]),
                curve("hybrid parallelism", [(gpus, hybrid) for gpus, _, hybrid in crossed], 1),
            ],
            "GPUs, 64 images each",
            "images/s",
            xaxis={"type": "log"},
            yaxis={"type": "log"},
        ),
        figure(
            "Figure 3",
            [
                *(curve(f"mini-batch {batch}", grown[batch], index) for index, batch in enumerate(BATCHES)),
                curve("ideal", [(1, 1), (64, 64)], dashed=True, marks=False),
                {**curve("paper", [(64, PAPER_SPEED_UP)], 3), "mode": "markers"},
            ],
            "GPUs",
            "speed-up in images a second",
        ),
        figure(
            "Figure 4",
            [
                curve(
                    f"{workers} GPU{'s' * (workers != 1)}",
                    [(images / rates[workers], top1) for images, top1 in each[0]],
                    index,
                )
                for index, (workers, each) in enumerate(curves.items())
            ],
            "seconds, at the rate of each number of GPUs",
            "test top-1",
            xaxis={"type": "log"},
            yaxis={"tickformat": ".0%"},
        ),
    ]
    facts: dict[str, Any] = {
        "share_of_peak": share,
        "bandwidth_bytes_per_s": bandwidth,
        "torch": torch.__version__,
    }
    write(chosen.out, "scaling", drawn, facts, "\n".join(lines))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

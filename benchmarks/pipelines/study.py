"""On which clusters is a pipeline faster than data parallelism, the hybrid, and local SGD?

    python benchmarks/pipelines/study.py [--steps 12] [--out DIR]

Four simulated hosts with one link each, of three speeds; six networks at 224 pixels, 16 pictures a worker and step. A
step's computing takes what its multiply-adds take at 4e12 a second, as on a card of a modest workstation. Dry runs:
messages in their sizes, and the time of computing; nothing is learned. Images a second, the mean over the run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from polyrhythm.api.simulate import simulate
from polyrhythm.data.dataset import Dataset, TensorSplit
from polyrhythm.errors import RequestError
from polyrhythm.simulation.cluster import Cluster, HostKind, Link, StepWork
from polyrhythm.simulation.step_times.constant import Constant

WORKERS, BATCH = 4, 16
PEAK = 4e12
NETWORKS = ("alexnet", "vgg16", "resnet18", "resnet50", "efficientnet_b0", "vit_b_16")
SPEEDS = {"1 Gb/s": 1.25e8, "10 Gb/s": 1.25e9, "100 Gb/s": 1.25e10}
STRATEGIES = {
    "synchronous": "synchronous",
    "hybrid": "hybrid",
    "local_sgd(steps=8)": "local_sgd(steps=8)",
    "pipeline, 1F1B": "pipeline(microbatches=16, balance=auto)",
    "pipeline, zero bubble": "pipeline(microbatches=16, balance=auto, schedule=zero_bubble)",
    "pipeline, 2BW": "pipeline(microbatches=16, balance=auto, schedule=double_buffered)",
    "2 stages, 2 copies": "pipeline(stages=2, replicas=2, microbatches=16, balance=auto)",
}


def pictures() -> Dataset:
    images = torch.zeros(1, 3, 1, 1).expand(WORKERS * BATCH, 3, 224, 224)
    split = TensorSplit(images, torch.arange(WORKERS * BATCH) % 1000)
    return Dataset("plain", split, split, tuple(map(str, range(1000))), (3, 224, 224), default_epochs=1)


def cluster(bytes_per_s: float) -> Cluster:
    return Cluster(
        name="four",
        hosts=(HostKind(name="host", count=WORKERS, accelerators=1),),
        nic=Link(latency_s=3e-5, bandwidth_bytes_per_s=bytes_per_s),
        inside=Link(latency_s=1e-6, bandwidth_bytes_per_s=2e10),
        step_time=Constant(seconds=1.0),
        step_of=StepWork(peak_multiply_adds_per_s=PEAK, share_of_peak=1.0),
    )


def images_per_s(network: str, strategy: str, bytes_per_s: float, steps: int, folder: Path) -> float | None:
    """Gives the images a second of a dry run; None where the strategy cannot cut the network."""
    try:
        run = simulate(
            data=pictures(),
            model=f"{network}",
            strategy=strategy,
            workers=WORKERS,
            batch_size=BATCH,
            cluster=cluster(bytes_per_s),
            gradients="none",
            steps=steps,
            out=folder,
        )
    except RequestError:
        return None
    return float(run.figures["images_per_s"])


def row(network: str, speed: str, steps: int) -> dict[str, Any]:
    found: dict[str, float | None] = {}
    with TemporaryDirectory() as place:
        for number, (name, strategy) in enumerate(STRATEGIES.items()):
            found[name] = images_per_s(network, strategy, SPEEDS[speed], steps, Path(place) / str(number))
    return {"network": network, "link": speed, "images_per_s": found}


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the table in Markdown; the fastest of each row is set off."""
    names = list(STRATEGIES)
    lines = ["| network | link | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    for each in rows:
        found = each["images_per_s"]
        best = max(value for value in found.values() if value is not None)
        cells = [
            "–" if value is None else f"**{value:.0f}**" if value >= 0.995 * best else f"{value:.0f}"
            for value in (found[name] for name in names)
        ]
        lines.append(f"| {each['network']} | {each['link']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for network in given.networks:
        for speed in SPEEDS:
            rows.append(row(network, speed, given.steps))
            (given.out / "study.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()

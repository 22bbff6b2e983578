"""Uneven machines that go each at its own pace: with fixed shares of every epoch, and with drawn batches.

    python benchmarks/uneven/drawn.py [--accuracy] [--profile FILE]

Simulated, in seconds of virtual time:

- four workers, one of them five times slow, 100 steps of 0.1 s, free links: 12.5 s if all speeds add up;
- two hosts of speed 3 and 1 on 1 Gb/s, ResNet-18: the fast one alone trains 320 images/s, both together 427 at best.
  A server works as long as its updates take: SGD with momentum over 11.7 million numbers and a copy of the answer, 27
  ms of one core (1.7 GB/s). `polyrhythm profile --model resnet18 --data synthetic --batch-size 8 --steps 5 --out FILE`
  measures it on a machine, and `--profile FILE` takes that.

`--accuracy` trains lenet5 on the first 10,000 pictures of Fashion-MNIST besides, with real gradients: five seeds of
three epochs on four workers of which one is five times slow, with fixed shares and with drawn batches. Tests are of all
10,000 test pictures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from polyrhythm.api.simulate import simulate
from polyrhythm.data.open import open_data
from polyrhythm.simulation.cluster import open_cluster

HERE = Path(__file__).parent
ONE_SLOW = """
name: one-slow
hosts:
  - {name: fast, count: 3, cores: 8, server_takes: 0}
  - {name: slow, count: 1, cores: 8, speed: 0.2, server_takes: 0}
nic: {latency_s: 1.0e-6, bandwidth_bytes_per_s: 1.0e13}
inside: {latency_s: 1.0e-6, bandwidth_bytes_per_s: 1.0e13}
step_time: constant(seconds=0.1)
"""
ONE_HOST = """
name: one-host
hosts:
  - {name: host, count: 1, cores: 64, workers: 4, server_takes: 0}
nic: {latency_s: 1.0e-6, bandwidth_bytes_per_s: 1.0e13}
inside: {latency_s: 1.0e-6, bandwidth_bytes_per_s: 1.0e13}
step_time: constant(seconds=0.1)
slow: {3: 5}
"""
TWO_HOSTS = """
name: two-hosts
hosts:
  - {name: desktop, count: 1, cores: 8}
  - {name: laptop, count: 1, cores: 8, speed: 0.3333333}
nic: {latency_s: 1.0e-4, bandwidth_bytes_per_s: 1.17e8}
inside: {latency_s: 2.0e-5, bandwidth_bytes_per_s: 4.0e9}
step_time: constant(seconds=SECONDS)
server_update: {seconds: 1.0e-4, bandwidth_bytes_per_s: UPDATED}
"""
UPDATED = 1.7e9
"""Bytes a second."""
FREE = [
    "parameter_server",
    "softsync",
    "staleness_aware",
    "dc_asgd",
    "downpour",
    "easgd",
    "eamsgd",
    "periodic_averaging",
    "hogwild",
    "ad_psgd",
    "mixed(replicas=2)",
]
ON_1_GB = [("parameter_server", 64), ("parameter_server", 256), ("ad_psgd", 64), ("ad_psgd", 256)]
ON_1_GB += [("easgd", 64), ("downpour", 64), ("parameter_server(overlap=false)", 64)]
DEALS, EPOCHS, PICTURES, SEEDS = ("static", "dynamic"), 3, 10_000, range(5)


def simulated(cluster: str, **options: object) -> dict[str, Any]:
    """Returns the figures of a run on a cluster given as text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(cluster)
        return dict(simulate(cluster=path, out=Path(folder) / "run", **options).figures)  # type: ignore[arg-type]


ALL_SPEEDS = 3.2 * 64 / 0.1
"""Images a second, of four workers of which one is five times slow."""


def one_slow(strategy: str, batches: str, balance: str = "auto") -> tuple[float, float]:
    """Returns the seconds of 400 steps of four workers, and their speed in step over the sum of their speeds."""
    where = ONE_HOST if strategy == "hogwild" else ONE_SLOW
    dry = {
        "gradients": "none",
        "data": "digits",
        "model": "mlp",
        "workers": 4,
        "steps": 100,
        "batch_size": 64,
    }
    figures = simulated(where, strategy=strategy, batches=batches, balance=balance, **dry)
    return round(figures["seconds"], 2), round(figures["sustained_images_per_s"] / ALL_SPEEDS, 3)


def on_two_hosts(batch_size: int, updated: float = UPDATED) -> str:
    """Returns the cluster of two hosts, of which the fast one alone trains 320 images a second."""
    return TWO_HOSTS.replace("SECONDS", str(batch_size / 320)).replace("UPDATED", str(updated))


def two_hosts(strategy: str, batch_size: int, batches: str, updated: float = UPDATED) -> dict[str, float]:
    """Returns the images a second of two hosts, in all and while both were at work, and shares of the time."""
    where = on_two_hosts(batch_size, updated)
    found = simulated(
        where,
        strategy=strategy,
        batches=batches,
        gradients="none",
        model="resnet18",
        workers=2,
        batch_size=batch_size,
        steps=6400 // batch_size,
    )
    shares = {
        name: round(found["held_back"][f"{name}_share"], 3) for name in ("compute", "server", "network")
    }
    speeds = {"whole": found["images_per_s"], "sustained": found["sustained_images_per_s"]}
    return {name: round(speed) for name, speed in speeds.items()} | shares


def accuracies(strategy: str, batches: str) -> list[float]:
    """Returns the top-1 of five seeds of four workers, one of which is five times slow."""
    data = open_data("fashion-mnist")
    few, tests = torch.arange(PICTURES), torch.arange(len(data.test))
    pairs = (data.train.images(few), data.train.labels[few]), (data.test.images(tests), data.test.labels)
    common = {"data": pairs, "model": "lenet5", "workers": 4, "batch_size": 32, "epochs": EPOCHS}
    return [
        simulated(ONE_HOST, strategy=strategy, batches=batches, seed=seed, keep_checkpoints=0, **common)[
            "test_top1"
        ]
        for seed in SEEDS
    ]


def main() -> None:
    """Runs all, and writes `drawn.json` beside this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--accuracy", action="store_true")
    found: dict[str, dict[str, object]] = {"one slow, seconds": {}, "two hosts, images/s": {}}
    parser.add_argument(
        "--profile", help="a cluster file of `polyrhythm profile`, for what a server's update costs"
    )
    asked = parser.parse_args()
    accuracy, updated = asked.accuracy, UPDATED
    if asked.profile:
        cost = open_cluster(asked.profile).server_update
        updated = updated if cost is None else cost.bandwidth_bytes_per_s
        found["server's update, bytes/s"] = {"parameter_server": updated}
    path = HERE / "drawn.json"
    if not accuracy:
        found["top-1"] = json.loads(path.read_text()).get("top-1", {}) if path.exists() else {}
    for strategy in FREE:
        row = {"static": one_slow(strategy, "static")[0]}
        row["dynamic"], row["sustained, of all speeds"] = one_slow(strategy, "dynamic")
        found["one slow, seconds"][strategy] = row
        print(f"{strategy:32} {row['fixed']:8.1f} s {row['drawn']:8.1f} s", flush=True)
    seconds, _ = one_slow("mixed(replicas=2)", "dynamic", "measured")
    found["one slow, seconds"]["mixed(replicas=2)"]["drawn, parts measured"] = seconds  # type: ignore[index]
    print(f"{'  and parts by speed in groups':32} {seconds:21.1f} s", flush=True)
    for strategy, batch_size in ON_1_GB:
        row = {batches: two_hosts(strategy, batch_size, batches, updated) for batches in DEALS}
        found["two hosts, images/s"][f"{strategy}, {batch_size} images"] = row
        told = (f"{row[batches]['whole']:6} images/s ({row[batches]['sustained']})" for batches in DEALS)
        print(f"{strategy:32} {batch_size:4} {' '.join(told)}", flush=True)
    if accuracy:
        found["top-1"] = {}
        for strategy in ("parameter_server",):
            tops = {batches: accuracies(strategy, batches) for batches in DEALS}
            found["top-1"][strategy] = tops
            told = (
                f"{batches} {statistics.mean(top):.4f} ± {statistics.stdev(top):.4f}"
                for batches, top in tops.items()
            )
            print(f"{strategy:24} {'  '.join(told)}", flush=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

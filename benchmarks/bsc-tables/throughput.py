"""Tables 1 and 2 of Campos et al., ICCS 2017, out of the simulator.

    python benchmarks/bsc-tables/throughput.py [--seconds 2000] [--seeds 3] [--calibrate] [--readings] [--out DIR]

Two of their figures are told to the simulator, in the ready cluster `bsc`: 1 node gives the time of a step, and 4 nodes
with 1 server what one server carries. The other rows follow.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what benchmarks share

from polyrhythm.config.assemble import strategy_from
from polyrhythm.models.create import create_model
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.simulation.cluster import Cluster, Link, open_cluster
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.step_times.log_normal import LogNormal
from polyrhythm.training.model_sizes import ModelSizes
from steady import ENDLESS, simulated_times, steps_per_s

BATCH, CLASSES = 128, 1200


@dataclass(frozen=True)
class Setup:
    """A row of their tables."""

    name: str
    table: str
    workers: int
    servers: int
    placement: str
    images_per_s: float

    @property
    def strategy(self) -> str:
        """A node's four GPUs are one worker, so a group between the servers is one replica."""
        if not self.servers:
            return "synchronous"
        return f"mixed(replicas=1, servers={self.servers}, placement={self.placement})"


ALONE = Setup("1 node", "1, 2", 1, 0, "shared", 124.18)
ONE_SERVER = Setup("4 nodes: 4 workers, 1 server next to one", "1", 4, 1, "shared", 292.22)
CALIBRATED_ON = (ALONE, ONE_SERVER)
PREDICTED = (
    Setup("2 nodes: 2 workers, 1 server next to one", "2", 2, 1, "shared", 195.60),
    Setup("4 nodes: 4 workers, 3 servers next to them", "1", 4, 3, "shared", 374.73),
    Setup("4 nodes: the same, measured again", "2", 4, 3, "shared", 383.09),
    Setup("7 nodes: 4 workers, 3 servers of their own", "1", 4, 3, "dedicated", 396.62),
    Setup("8 nodes: 8 workers, 7 servers next to them", "2", 8, 7, "shared", 809.10),
)


@dataclass(frozen=True)
class Simulation:
    """How long and how often a row is simulated.

    Attributes:
        seconds: virtual ones.
        seeds: of which the mean is taken.
    """

    seconds: float
    seeds: int

    def images_per_s(self, cluster: Cluster, setup: Setup) -> float:
        """Simulates a row."""
        return statistics.mean(self._once(cluster, setup, seed) for seed in range(self.seeds))

    def _once(self, cluster: Cluster, setup: Setup, seed: int) -> float:
        dry_run = DryRun(
            strategy=strategy_from(setup.strategy),
            workers=setup.workers,
            sizes=ModelSizes((parameters(),), (1.0,)),
            steps=ENDLESS,
            batch_size=BATCH,
            seed=seed,
        )
        strategy = dry_run.strategy
        layout = lay_out(
            cluster,
            setup.workers,
            strategy.traits(setup.workers).servers,
            strategy.traits(setup.workers).placement,
        )
        return BATCH * steps_per_s(simulated_times(layout, dry_run, self.seconds), windows=1)


_counted: list[int] = []


def parameters() -> int:
    """Counts the parameters of their network, once."""
    if not _counted:
        with torch.device("meta"):
            model = create_model("resnet50", classes=CLASSES, image_shape=(3, 224, 224))
        _counted.append(sum(parameter.numel() for parameter in model.parameters()))
    return _counted[0]


def calibrated(
    bandwidth_to_cluster: Callable[[float], Cluster], simulation: Simulation
) -> tuple[float, Cluster]:
    """Finds the bandwidth at which 4 nodes with 1 server are as fast as theirs, by bisection; gives it in bytes/s."""
    low, high = 1e8, 2e9
    while high / low > 1.002:
        middle = (low * high) ** 0.5
        if simulation.images_per_s(bandwidth_to_cluster(middle), ONE_SERVER) < ONE_SERVER.images_per_s:
            low = middle
        else:
            high = middle
    return high, bandwidth_to_cluster(high)


def of_a_server(cluster: Cluster) -> Callable[[float], Cluster]:
    """What one server carries is limited, whatever the hosts' links."""
    return lambda bandwidth: cluster.model_copy(update={"server_bandwidth_bytes_per_s": bandwidth})


def of_a_host(cluster: Cluster) -> Callable[[float], Cluster]:
    """What the link of every host carries is limited, whoever sends."""

    def limited(bandwidth: float) -> Cluster:
        nic = Link(latency_s=cluster.nic.latency_s, bandwidth_bytes_per_s=bandwidth)
        return cluster.model_copy(update={"nic": nic, "server_bandwidth_bytes_per_s": None})

    return limited


def table(cluster: Cluster, simulation: Simulation) -> list[dict[str, object]]:
    """Simulates all rows; what they measured twice is simulated once."""
    rows: list[dict[str, object]] = []
    found: dict[tuple[str, int], float] = {}
    for setup in (*CALIBRATED_ON, *PREDICTED):
        key = (setup.strategy, setup.workers)
        if key not in found:
            found[key] = simulation.images_per_s(cluster, setup)
        simulated = found[key]
        error = simulated / setup.images_per_s - 1
        calibrated_on = setup in CALIBRATED_ON
        rows.append({**asdict(setup), "simulated": simulated, "error": error, "calibrated_on": calibrated_on})
    return rows


HEAD = "| setup | table | paper, images/s | simulated | error |\n|---|---|---|---|---|"


def line(row: dict[str, object]) -> str:
    """A row as Markdown."""
    error = f"{100 * float(str(row['error'])):+.1f} %" + (" (calibrated on)" if row["calibrated_on"] else "")
    return f"| {row['name']} | {row['table']} | {row['images_per_s']} | {row['simulated']:.1f} | {error} |"


def readings(cluster: Cluster, simulation: Simulation) -> None:
    """Compares where the limit may be, and how much the spread of step times and the speed inside a node matter."""
    print(
        "| limit | spread of steps | inside a node | calibrated | "
        + " | ".join(f"{s.name}" for s in PREDICTED)
        + " |"
    )
    print("|---|---|---|---|" + "---|" * len(PREDICTED))
    cases = [("a server's", of_a_server, 0.1, 1e10), ("a server's", of_a_server, 0.05, 1e10)]
    cases += [("a server's", of_a_server, 0.2, 1e10), ("a server's", of_a_server, 0.1, 2e9)]
    cases += [("a host's", of_a_host, 0.1, 1e10)]
    for name, limit, sigma, inside in cases:
        spread = LogNormal(mean=BATCH / ALONE.images_per_s, sigma=sigma)
        link = Link(latency_s=cluster.inside.latency_s, bandwidth_bytes_per_s=inside)
        varied = cluster.model_copy(update={"step_time": spread, "inside": link})
        bandwidth, fitted = calibrated(limit(varied), simulation)
        errors = [simulation.images_per_s(fitted, setup) / setup.images_per_s - 1 for setup in PREDICTED]
        told = " | ".join(f"{100 * error:+.1f} %" for error in errors)
        print(
            f"| {name} | {sigma} | {inside / 1e9:g} GB/s | {bandwidth / 1e6:.0f} MB/s | {told} |", flush=True
        )


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--seconds", type=float, default=2000.0)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--calibrate", action="store_true", help="find the ready cluster's bandwidth anew")
    options.add_argument("--readings", action="store_true", help="compare other ways to read the paper")
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    simulation, cluster = Simulation(chosen.seconds, chosen.seeds), open_cluster("bsc")
    if chosen.calibrate:
        bandwidth, cluster = calibrated(of_a_server(cluster), simulation)
        print(f"calibrated: server_bandwidth_bytes_per_s {bandwidth:.4g}\n", flush=True)
    rows = table(cluster, simulation)
    text = "\n".join([HEAD, *map(line, rows)])
    print(text)
    if chosen.out is not None:
        chosen.out.mkdir(parents=True, exist_ok=True)
        facts = {"command": " ".join(["python", *sys.argv]), "parameters": parameters(), "rows": rows}
        (chosen.out / "throughput.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        (chosen.out / "throughput.md").write_text(f"`{facts['command']}`\n\n{text}\n", encoding="utf-8")
    if chosen.readings:
        print()
        readings(cluster, simulation)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

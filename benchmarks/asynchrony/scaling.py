"""Campos et al., ICCS 2017, as one table: modes and nodes against throughput, time to a loss and accuracy.

    python benchmarks/asynchrony/scaling.py --out benchmarks/asynchrony [--images 12000] [--epochs 3] [--seeds 3]

Real gradients in virtual time. A node is two replicas with half of the node's batch each; every mode and every number
of nodes sees the same images, with the same rate a gradient (but for the row that says otherwise). The ready cluster
`bsc` with its links and servers as much slower as this network is smaller than theirs, so that a step's transfers take
the share of its time that theirs did. Results are written after every run; one that is there is not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from study import Outcome, job_of, run, spread

from polyrhythm.roles.job import Job
from polyrhythm.simulation.cluster import Cluster, Link, open_cluster

SERVERS = {1: 1, 2: 1, 4: 3, 8: 7}
"""By nodes, as in their table 2; they say nothing of servers on 1 node."""

REPLICAS = 2
NODE_BATCH = 32
MODEL = "lenet5(widths=[8, 16], hidden=64)"
PAPER_PARAMETERS = 25_966_832
PAPER = {1: (1.0, 1.0), 2: (1.58, 1.69), 4: (3.09, 2.80), 8: (6.52, 4.73)}
"""By nodes: speed-ups of throughput, and of time (tables 2 and 3)."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row: what is trained, on how many nodes.

    Attributes:
        name: of the mode or the remedy.
        strategy: its spec; `{servers}` stands for their number.
        nodes: of two replicas each.
        rates: by how much the rate of a gradient is larger than that of the other rows.
    """

    name: str
    strategy: str
    nodes: int
    rates: float = 1.0

    @property
    def spec(self) -> str:
        """The strategy, with as many servers as they had."""
        return self.strategy.format(servers=SERVERS[self.nodes])


MODES = {
    "synchronous": "parameter_server(consistency=synchronous, servers={servers})",
    "asynchronous": "parameter_server(servers={servers})",
    "mixed": f"mixed(replicas={REPLICAS}, servers={{servers}})",
}
REMEDIES = {
    "DC-ASGD-a": "dc_asgd(servers={servers})",
    "DC-ASGD-c": "dc_asgd(variant=c, servers={servers})",
    "staleness-aware": "staleness_aware(servers={servers})",
    "SSP, s = 1": "ssp(s=1, servers={servers})",
}


def cases(nodes: list[int], remedied: list[int]) -> list[Case]:
    """Return the rows in order: modes by nodes, then what is done about staleness."""
    rows = [
        Case(name=name, strategy=spec, nodes=count)
        for count in nodes
        for name, spec in MODES.items()
        if count > 1 or name == "synchronous"  # as is a node's mixed mode, and BSC's only one there
    ]
    for count in remedied:
        times = f"synchronous, {count} times the rate"
        rows.append(Case(name=times, strategy=MODES["synchronous"], nodes=count, rates=count))
        rows += [Case(name=name, strategy=spec, nodes=count) for name, spec in REMEDIES.items()]
    return rows


def cluster_for(job: Job) -> Cluster:
    """Makes the cluster: two places a node, and links as slow as the network is small."""
    cluster = open_cluster("bsc")
    share = sum(parameter.numel() for parameter in job.make_model().parameters()) / PAPER_PARAMETERS
    assert cluster.server_bandwidth_bytes_per_s is not None, "the ready cluster has it"

    def slower(link: Link) -> Link:
        return link.model_copy(update={"bandwidth_bytes_per_s": link.bandwidth_bytes_per_s * share})

    return cluster.model_copy(
        update={
            "hosts": tuple(host.model_copy(update={"workers": REPLICAS}) for host in cluster.hosts),
            "nic": slower(cluster.nic),
            "inside": slower(cluster.inside),
            "server_bandwidth_bytes_per_s": cluster.server_bandwidth_bytes_per_s * share,
        }
    )


def trial(case: Case, seed: int, chosen: argparse.Namespace) -> Outcome | None:
    """Trains once."""
    options: dict[str, Any] = {
        "data": "fashion-mnist",
        "model": MODEL,
        "strategy": case.spec,
        "workers": case.nodes * REPLICAS,
        "optimizer": f"tf1_rmsprop(lr={chosen.rate * case.rates}, decay=0.9, epsilon=1.0, weight_decay=0.0001)",
        "schedule": "constant",
        "batch_size": NODE_BATCH // REPLICAS,
        "epochs": chosen.epochs,
        "seed": seed,
    }
    job = job_of(options, chosen.images, chosen.tested)
    return run(job, cluster_for(job), chosen.loss)


HEAD = (
    "| mode | nodes | images/s | speed-up | efficiency | seconds to the loss | speed-up in time | top-1 | staleness |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def line(case: Case, found: list[Outcome | None], alone: list[Outcome]) -> str:
    """A row as Markdown, beside one node's synchronous mode."""
    ended = [entry for entry in found if entry is not None]
    if not ended:
        return f"| {case.name} | {case.nodes} | | | | | | diverged, all {len(found)} | |"
    speed = statistics.mean(entry.images_per_s for entry in ended)
    speedup = speed / statistics.mean(entry.images_per_s for entry in alone)
    reached = [entry.target_s for entry in ended if entry.target_s is not None]
    in_time = spread(reached, 0) if reached else "never"
    sooner = ""
    if reached and len(reached) < len(found):
        in_time += f" ({len(reached)} of {len(found)})"
    elif reached and None not in (first := [entry.target_s for entry in alone]):
        sooner = f"{statistics.mean(t for t in first if t is not None) / statistics.mean(reached):.2f}"
    diverged = f" ({len(found) - len(ended)} diverged)" if len(ended) < len(found) else ""
    return (
        f"| {case.name} | {case.nodes} | {speed:.1f} | {speedup:.2f} | {speedup / case.nodes:.2f} "
        f"| {in_time} | {sooner} "
        f"| {spread([100 * entry.top1 for entry in ended])} %{diverged} "
        f"| {statistics.mean(entry.staleness for entry in ended):.1f} |"
    )


def numbers(text: str) -> list[int]:
    """Reads whole numbers with commas between them."""
    return [int(part) for part in text.split(",")]


def options() -> argparse.Namespace:
    """Reads the command line."""
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("--seeds", type=int, default=3)
    read.add_argument("--rate", type=float, default=0.05)
    read.add_argument("--images", type=int, default=12000)
    read.add_argument("--tested", type=int, default=5000)
    read.add_argument("--epochs", type=int, default=3)
    read.add_argument("--loss", type=float, default=0.7)
    read.add_argument("--nodes", type=numbers, default=[*SERVERS])
    read.add_argument("--remedied", type=numbers, default=[8])
    read.add_argument(
        "--table", action="store_true", help="of what has been found by now; nothing is trained"
    )
    read.add_argument("--only", default="", help="names of rows, with semicolons between them; default: all")
    read.add_argument("--name", default="scaling", help="of the files that are written")
    read.add_argument("--out", type=Path, default=None)
    return read.parse_args()


def main() -> None:
    chosen = options()
    elsewhere = ("out", "nodes", "remedied", "seeds", "table", "only", "name")
    facts = {name: value for name, value in vars(chosen).items() if name not in elsewhere}
    results = chosen.out / f"{chosen.name}.json" if chosen.out is not None else None
    kept: dict[str, Any] = {"facts": facts, "torch": torch.__version__, "seconds": 0.0, "trials": {}}
    if results is not None and results.exists():
        read = json.loads(results.read_text(encoding="utf-8"))
        if read["facts"] == facts:
            kept = read
    wanted = {name.strip() for name in chosen.only.split(";")} - {""}
    rows = [case for case in cases(chosen.nodes, chosen.remedied) if not wanted or case.name in wanted]
    for seed in range(0 if chosen.table else chosen.seeds):
        for case in sorted(rows, key=lambda case: -case.nodes):  # the dearest first
            key = f"{case.name}; {case.nodes}; {seed}"
            if key in kept["trials"]:
                continue
            began = time.process_time()
            outcome = trial(case, seed, chosen)
            kept["seconds"] += time.process_time() - began
            kept["trials"][key] = None if outcome is None else asdict(outcome)
            print(key, kept["trials"][key], file=sys.stderr, flush=True)
            if results is not None:
                results.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    table = tabulate(rows, kept["trials"], chosen.seeds)
    print(table)
    if chosen.out is not None:
        command = " ".join(["python", *sys.argv])
        said = f"`{command}`: {chosen.seeds} seeds, {kept['seconds']:.0f} core-seconds, torch {torch.__version__}."
        (chosen.out / f"{chosen.name}.md").write_text(f"{said}\n\n{table}\n", encoding="utf-8")


def tabulate(rows: list[Case], trials: dict[str, Any], seeds: int) -> str:
    """Makes the table of what has been found, and what asynchrony costs and others win back."""

    def found(case: Case) -> list[Outcome | None]:
        keys = [f"{case.name}; {case.nodes}; {seed}" for seed in range(seeds)]
        kept = [trials[key] for key in keys if key in trials]
        return [None if entry is None else Outcome(**entry) for entry in kept]

    alone = [entry for entry in found(rows[0]) if entry is not None]
    lines = [HEAD, *(line(case, found(case), alone) for case in rows), ""]
    for nodes in sorted({case.nodes for case in rows} - {1}):
        accuracies = {
            case.name: [100 * entry.top1 for entry in found(case) if entry is not None]
            for case in rows
            if case.nodes == nodes
        }
        lines.append(won_back(nodes, accuracies, [100 * entry.top1 for entry in alone]))
    return "\n".join(lines)


def won_back(nodes: int, accuracies: dict[str, list[float]], alone: list[float]) -> str:
    """Says what asynchrony costs on some nodes, in points of the mean accuracy, and what each other mode wins back."""
    means = {name: statistics.mean(found) for name, found in accuracies.items() if found}
    if not alone or "asynchronous" not in means:
        return ""
    least = means.pop("asynchronous")
    others = ", ".join(f"{name} {mean - least:+.1f}" for name, mean in means.items())
    return f"- {nodes} nodes: asynchrony costs {statistics.mean(alone) - least:.1f} points against one node; {others}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

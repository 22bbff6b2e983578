"""Servers whose traffic hides behind computing, beside those whose does not: on real ranks, and simulated.

    python benchmarks/overlapped-servers/measure.py [--steps 10] [--compute-s 0.6] [--servers 1 2] [--json FILE]

Two hosts are network namespaces with links of 1 Gb/s (`benchmarks/namespaces.py`; needs root), one worker each; servers
are on the first, or on both. The model is ResNet-18 with every number there, its buckets and the shares of its layers.
Computing is a sleep; messages, servers and their optimizer are real. Both ways run in turn. What a step takes beyond
its computing is exposed communication. The simulator is told the link, as measured, and what a step of one worker alone
takes beyond its sleep.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no name server knows the namespaces, and it says so

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what benchmarks share
sys.path.insert(0, str(Path(__file__).parents[1] / "simulator-fidelity"))

from links import link_to_next

from namespaces import Host, shaped_hosts
from polyrhythm.communication.communicator import Communicator
from polyrhythm.config.assemble import strategy_from
from polyrhythm.config.model import shapes_of
from polyrhythm.planning.link import MeasuredLink
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.roles.world import DrawnPace, StopRequest, World
from polyrhythm.simulation.cluster import Cluster, HostKind, Link
from polyrhythm.simulation.layout import Layout, lay_out
from polyrhythm.simulation.run import perform
from polyrhythm.simulation.step_times.constant import Constant
from polyrhythm.training.model_sizes import ModelSizes, sizes_of
from polyrhythm.training.optimizers.sgd import SGD
from ranks import on_hosts
from steady import Marks, simulated_times

BITS_PER_S, WORKERS, SETTLING = 1e9, 2, 2
IMAGE = 1, 28, 28
CONSISTENCIES = ("synchronous", "asynchronous")
_FREE = Link(latency_s=0.0, bandwidth_bytes_per_s=1e12)


@dataclass(frozen=True)
class Row:
    """One line of the table; seconds of a step, its computing included.

    Attributes:
        consistency: of the servers.
        servers: how many.
        whole_s: without overlap.
        overlapped_s: with it.
        simulated_whole_s: what the simulator says.
        simulated_overlapped_s: likewise.
        compute_s: of a step.
    """

    consistency: str
    servers: int
    whole_s: float
    overlapped_s: float
    simulated_whole_s: float
    simulated_overlapped_s: float
    compute_s: float

    def line(self) -> str:
        """As a line of Markdown."""
        exposed = [taken - self.compute_s for taken in (self.whole_s, self.overlapped_s)]
        errors = (
            self.simulated_whole_s / self.whole_s - 1,
            self.simulated_overlapped_s / self.overlapped_s - 1,
        )
        return (
            f"| {self.consistency} | {self.servers} | {self.whole_s:.3f} | {self.overlapped_s:.3f} | {exposed[0]:.3f} "
            f"| {exposed[1]:.3f} | {self.simulated_whole_s:.3f} ({errors[0]:+.1%}) "
            f"| {self.simulated_overlapped_s:.3f} ({errors[1]:+.1%}) |"
        )


HEAD = (
    "| consistency | servers | step, s | overlapped | exposed, s | overlapped | simulated (error) | overlapped |\n"
    "|---|---|---|---|---|---|---|---|"
)


def dry_run_of(spec: str, sizes: ModelSizes, workers: int, steps: int) -> DryRun:
    """Return what all ranks play."""
    return DryRun(
        strategy=strategy_from(spec),
        workers=workers,
        sizes=sizes,
        steps=steps,
        optimizer=SGD(lr=0.1),
        exact=True,
    )


def layout_of(dry_run: DryRun, compute_s: float, between: Link, inside: Link) -> Layout:
    """Place the ranks on as many hosts as there are workers."""
    host = HostKind(name="namespace", count=dry_run.workers, cores=4, server_takes=0.0)
    step_time = Constant(seconds=compute_s)
    cluster = Cluster(name="namespaces", hosts=(host,), nic=between, inside=inside, step_time=step_time)
    traits = dry_run.traits
    return lay_out(cluster, dry_run.workers, traits.servers, traits.placement)


def measured_s(hosts: list[Host], dry_run: DryRun, compute_s: float) -> float:
    """Return the seconds of a step on real ranks: the median over workers and steps."""
    layout = layout_of(dry_run, compute_s, _FREE, _FREE)

    def play(network: Communicator) -> list[float]:
        marks = Marks(lambda: compute_s, time.monotonic)
        perform(dry_run, World(network, layout.roles, DrawnPace(network.clock, marks), StopRequest()))
        return marks.times

    times = on_hosts([hosts[host] for host in layout.host_of], play)
    return typical_s([times[worker] for worker in layout.roles.workers])


def typical_s(times: list[list[float]]) -> float:
    """Return the median time from one step to the next, without the first ones."""
    return statistics.median(second - first for own in times for first, second in pairwise(own[SETTLING:]))


def main() -> None:
    """Measure all rows, and print them."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--compute-s", type=float, default=0.6)
    options.add_argument("--servers", type=int, nargs="+", default=[1, 2])
    options.add_argument("--turns", type=int, default=2)
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    sizes = sizes_of(shapes_of("resnet18", 10, IMAGE), IMAGE)
    compute_s, rows = chosen.compute_s, []
    print(HEAD, flush=True)
    with shaped_hosts(WORKERS, BITS_PER_S, plain=True) as hosts:
        links = [
            on_hosts(pair, lambda network: link_to_next(network, 4 << 20))[0]
            for pair in (hosts, hosts[:1] * 2)
        ]
        assert all(isinstance(link, MeasuredLink) for link in links)
        between, inside = (Link(**asdict(link)) for link in links)
        alone = measured_s(hosts, dry_run_of("synchronous", sizes, 1, chosen.steps), compute_s)
        for consistency in CONSISTENCIES:
            for servers in chosen.servers:
                dry = {
                    overlap: dry_run_of(
                        f"parameter_server(servers={servers}, consistency={consistency}, overlap={overlap})",
                        sizes,
                        WORKERS,
                        chosen.steps,
                    )
                    for overlap in ("false", "true")
                }
                found: dict[str, list[float]] = {"false": [], "true": []}
                for _ in range(chosen.turns):
                    for overlap, dry_run in dry.items():
                        found[overlap].append(measured_s(hosts, dry_run, compute_s))
                simulated = []
                for dry_run in dry.values():
                    layout = layout_of(dry_run, alone, between, inside)
                    simulated.append(typical_s(simulated_times(layout, replace(dry_run, exact=False), 1e9)))
                measured = [statistics.median(each) for each in found.values()]
                rows.append(Row(consistency, servers, *measured, *simulated, compute_s))
                print(rows[-1].line(), flush=True)
    if chosen.json is not None:
        facts = {"alone_s": alone, "between": asdict(links[0]), "inside": asdict(links[1])}
        table = {**facts, "rows": [asdict(row) for row in rows]}
        chosen.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""What it costs to simulate many ranks without gradients, contention modeled.

    python benchmarks/simulator-speed/measure.py [--workers 100 1000 10000] [--servers 1 4] [--steps 100]
        [--per-host 1] [--per-rack 0]

Asynchronous `parameter_server` on hosts with 10 Gb/s NICs, dedicated servers, exponential compute times; the servers'
NICs are always full. Every row runs in a process of its own, one thread; seconds are of the processor.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch

from polyrhythm.events import Event
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.simulation.cluster import Cluster
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import simulate_dry_on
from polyrhythm.specs import build
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.training.model_sizes import ModelSizes

PARAMETERS = 1_000_000
MEAN_STEP_S = 0.1
_LINE = (
    "| {workers:,} | {servers} | {seconds:.1f} | {messages_per_s:,.0f} | {us_per_message:.1f} | {peak_mb:,.0f} "
    "| {virtual_seconds:,.1f} | {staleness:,.1f} |"
)


def cluster_of(workers: int, servers: int, per_host: int, per_rack: int) -> Cluster:
    """Describes hosts of equal NICs: the workers', then one a server; a rack's uplink has a quarter of theirs."""
    return Cluster.model_validate(
        {
            "name": "many",
            "hosts": [
                {"name": "workers", "count": -(-workers // per_host), "workers": per_host, "cores": 16},
                {"name": "server", "count": servers},
            ],
            "nic": {"latency_s": 50e-6, "bandwidth_bytes_per_s": 1.25e9},
            "inside": {"latency_s": 5e-6, "bandwidth_bytes_per_s": 1e10},
            "racks": {"hosts": per_rack, "oversubscription": 4.0} if per_rack else None,
            "step_time": f"exponential(mean={MEAN_STEP_S})",
        }
    )


def simulate_row(options: argparse.Namespace) -> dict[str, Any]:
    """Simulates one row; gives its figures."""
    workers, servers = options.workers[0], options.servers[0]
    torch.set_num_threads(1)
    strategy = build("strategy", f"parameter_server(servers={servers}, placement=dedicated)", *FAMILIES)
    assert isinstance(strategy, Strategy)
    events: list[Event] = []
    before = time.process_time()
    cluster = cluster_of(workers, servers, options.per_host, options.per_rack)
    layout = lay_out(cluster, workers, servers, strategy.traits(workers).placement)
    sizes = ModelSizes((PARAMETERS,), (1.0,))
    dry_run = DryRun(strategy=strategy, workers=workers, sizes=sizes, steps=options.steps)
    simulate_dry_on(layout, dry_run, events.append)
    seconds = time.process_time() - before
    result = events[-1].result  # type: ignore[attr-defined]
    messages = 2 * workers * servers * options.steps
    return {
        "workers": workers,
        "servers": servers,
        "seconds": seconds,
        "messages_per_s": messages / seconds,
        "us_per_message": 1e6 * seconds / messages,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "virtual_seconds": result["seconds"],
        "staleness": result["staleness"]["mean"],
    }


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--workers", type=int, nargs="+", default=[100, 1000, 10_000])
    options.add_argument("--servers", type=int, nargs="+", default=[1, 4])
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--per-host", type=int, default=1)
    options.add_argument("--per-rack", type=int, default=0)
    options.add_argument("--row", action="store_true", help="simulate in this process; print JSON")
    chosen = options.parse_args()
    if chosen.row:
        print(json.dumps(simulate_row(chosen)))
        return
    print(
        "| workers | servers | seconds | messages/s | us a message | peak MB | virtual seconds | staleness |"
    )
    print("|---|---|---|---|---|---|---|---|")
    shape = [f"--steps={chosen.steps}", f"--per-host={chosen.per_host}", f"--per-rack={chosen.per_rack}"]
    for servers in chosen.servers:
        for workers in chosen.workers:
            command = [
                sys.executable,
                __file__,
                "--row",
                f"--workers={workers}",
                f"--servers={servers}",
                *shape,
            ]
            row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(_LINE.format(**row), flush=True)


if __name__ == "__main__":
    main()

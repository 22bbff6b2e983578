"""Time to an accuracy on real ranks: four hosts in network namespaces, their links shaped, and their simulation.

    python benchmarks/time-to-accuracy/real_ranks.py [--seeds 3] [--strategies "S1; S2"] [--out DIR]

The job is that of `task.py`, on four hosts. A step computes real gradients and sleeps 10 ms, so that two cores carry
four ranks; a straggler sleeps three times as long. Needs root, for the namespaces.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from task import SLOW_RANK, SLOWER, Trial, Watch, cell, cluster_of, job_of, some_fashion

sys.path.insert(0, str(Path(__file__).parents[1]))

from namespaces import Host, shaped_hosts
from polyrhythm.communication.communicator import Communicator
from polyrhythm.roles.job import Job
from polyrhythm.roles.worker import work
from polyrhythm.roles.world import DrawnPace, World
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import simulate_on
from polyrhythm.strategies.role_assignment import roles_in_order
from ranks import on_hosts

HOSTS = 4
RATES_BITS_PER_S = {"100 Mb/s": 1e8, "1 Gb/s": 1e9}
STRATEGIES = ("synchronous(collective=ring)", "sgp")
STEP_S = 0.01
COMPUTING_S = 0.002
"""What a real step takes beside its sleep, on the machine of the results; the simulation is told."""


def slowness(rank: int, straggler: bool) -> float:
    """By which factor a rank's steps are longer."""
    return SLOWER if straggler and rank == SLOW_RANK else 1.0


def measured(job: Job, hosts: Sequence[Host], straggler: bool, target: float) -> tuple[float | None, float]:
    """Trains on real ranks; gives the seconds until a test reached the target, and the best accuracy seen."""

    def play(network: Communicator) -> tuple[float | None, float]:
        watch = Watch(target)
        pace = DrawnPace(network.clock, lambda: STEP_S * slowness(network.rank, straggler))
        roles = roles_in_order(HOSTS, 0)
        work(job, World(network, roles, pace, watch.stop, watch.on_event))
        return watch.seconds, watch.best

    return on_hosts(hosts, play)[0]  # type: ignore[no-any-return]


def simulated(job: Job, network: str, straggler: bool, target: float) -> tuple[float | None, float]:
    """The same in virtual time."""
    whole_s = STEP_S + COMPUTING_S
    slower = (SLOWER * STEP_S + COMPUTING_S) / whole_s if straggler else 1.0
    cluster = cluster_of(network, HOSTS, f"constant(seconds={whole_s})", slower)
    watch = Watch(target)
    layout = lay_out(cluster, HOSTS, 0, job.strategy.traits(HOSTS).placement)
    simulate_on(layout, job, watch.on_event, stop=watch.stop)
    return watch.seconds, watch.best


def table(real: list[Trial], virtual: list[Trial]) -> str:
    """One row a strategy and network."""
    lines = ["| strategy | links | straggler | measured, s | simulated, s |", "|---|---|---|---|---|"]
    rows = dict.fromkeys((entry.strategy, entry.network, entry.straggler) for entry in real)
    for row in rows:
        of_row = [
            [entry for entry in trials if (entry.strategy, entry.network, entry.straggler) == row]
            for trials in (real, virtual)
        ]
        strategy, network, straggler = row
        cells = " | ".join(map(cell, of_row))
        lines.append(f"| `{strategy}` | {network} | {'yes' if straggler else 'no'} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Measures, simulates, and prints both."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--target", type=float, default=0.82)
    options.add_argument("--strategies", type=lambda text: text.split("; "), default=[*STRATEGIES])
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    data = some_fashion()
    real: list[Trial] = []
    virtual: list[Trial] = []
    for network, bits_per_s in RATES_BITS_PER_S.items():
        with shaped_hosts(HOSTS, bits_per_s) as hosts:
            for spec in chosen.strategies:
                for straggler in (False, True):
                    for seed in range(chosen.seeds):
                        job = job_of(data, spec, HOSTS, seed)
                        which = spec, network, straggler, seed
                        real.append(Trial(*which, *measured(job, hosts, straggler, chosen.target)))
                        virtual.append(Trial(*which, *simulated(job, network, straggler, chosen.target)))
    print(table(real, virtual))
    if chosen.out is not None:
        text = json.dumps(
            [
                {"real": asdict(one), "simulated": asdict(other)}
                for one, other in zip(real, virtual, strict=True)
            ],
            indent=1,
        )
        (chosen.out / "real_ranks.json").write_text(text + "\n")
        (chosen.out / "real_ranks.md").write_text(table(real, virtual) + "\n")


if __name__ == "__main__":
    main()

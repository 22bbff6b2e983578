"""Thousands of simulated runs in which things go wrong, each watched by what its strategy declares to hold.

    python benchmarks/fault-seeds/fault_seeds.py [--seeds 1000] [--only NAME …] [--out DIR]

Every strategy, with its defaults and (every other seed) with two servers where it has servers: 4 workers whose steps
take exponentially long, 8 steps each. Each seed draws one to three faults. One seed in four, some rank that the run
needs is killed as well: then the run must end with that death named, or have been over before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyrhythm.config.dry_run import sizes_for
from polyrhythm.errors import RunError
from polyrhythm.events import Event, WorkerJoined, WorkerLost
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.simulation.cluster import Cluster
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.trials import Trial, drawn_death, faults_of, faults_text, play
from polyrhythm.specs import build, choices
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.training.model_sizes import ModelSizes
from polyrhythm.verification.families import invariants_for
from polyrhythm.verification.invariant import Conditions, Invariant

WORKERS, STEPS, STEP_S = 4, 8, 0.01
SHAPE = (3, 16, 16)
"""Of pictures, where a network's convolutions are cut."""
ONE_IN = 4
"""One seed in so many has a rank killed that the run needs."""

DEATH_IS_NAMED = "and the run needs it"
ALSO = (
    "parameter_server(consistency=synchronous)",
    "easgd(mode=synchronous, tau=2)",
    "parameter_server(servers=2, consistency=synchronous)",
    "parameter_server(servers=2, consistency=bounded_staleness(s=2, cached_reads=True))",
    "mixed(servers=2, consistency=synchronous)",
    "mixed(servers=2, inside=local_sgd(steps=3))",
    "mixed(replicas=3, consistency=synchronous, inside=local_sgd(steps=2))",
    "easgd(mode=synchronous, tau=2, servers=2)",
    "sgp(overlap=True)",
    "slowmo(steps=3, base=sgp)",
    "synchronous(collective=ring)",
    "pipeline(schedule=zero_bubble)",
    "pipeline(schedule=interleaved)",
    "pipeline(schedule=weight_stashing)",
    "pipeline(schedule=double_buffered)",
    "pipeline(stages=2, replicas=2, inside=local_sgd(steps=2))",
    "pipeline(replicas=[2, 1, 1])",
    "hybrid(trunk=channels)",
    "hybrid(trunk=height, scheme=b)",
)


@dataclass
class Row:
    """What became of the seeds of a strategy."""

    strategy: str
    invariants: list[str]
    seeds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    joined: int = 0
    named_ends: int = 0
    seconds: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)


def strategy_of(spec: str) -> Strategy:
    """Builds a strategy."""
    built = build("strategy", spec, *FAMILIES)
    assert isinstance(built, Strategy)
    return built


def convolving() -> nn.Module:
    """Return a network of shapes with convolutions to cut, of 400 kB as well."""
    with torch.device("meta"):
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 64, 46), nn.ReLU(), nn.Linear(46, 10),
        )  # fmt: skip


def trial_of(strategy: Strategy) -> Trial:
    """Return what is tried: a model of 400 kB takes a third of a mean step on the wire."""
    nic = {"latency_s": 1e-4, "bandwidth_bytes_per_s": 1.2e8}
    kind = {"name": "host", "count": WORKERS + 4, "cores": 8}
    if strategy.traits(WORKERS).one_host:
        kind |= {"count": 1, "workers": WORKERS}
    where = Cluster(name="small", hosts=[kind], nic=nic, inside=nic, step_time=f"exponential(mean={STEP_S})")
    layout = lay_out(where, WORKERS, strategy.traits(WORKERS).servers, strategy.traits(WORKERS).placement)
    sizes = ModelSizes((100_000,), (1.0,))
    if strategy.faults(WORKERS).may_repeat:  # what may be half made has layers
        sizes = ModelSizes((30_000, 30_000, 40_000), (0.3, 0.3, 0.4))
    if strategy.traits(WORKERS).trunk not in (None, "copied"):
        sizes = sizes_for(convolving(), SHAPE, strategy, WORKERS)
    dry_run = DryRun(strategy=strategy, workers=WORKERS, steps=STEPS, sizes=sizes)
    return Trial(layout=layout, dry_run=dry_run)


def declared(strategy: Strategy) -> list[str]:
    """Names what a strategy declares to hold."""
    trial = trial_of(strategy)
    numbers = trial.dry_run.stand_in.numbers
    gradient = torch.zeros(numbers)
    conditions = Conditions(
        roles=trial.layout.roles, numbers=numbers, gradient=lambda worker, step: gradient, steps=STEPS
    )
    return sorted({_name(entry) for entry in invariants_for(strategy, conditions)})


def _name(entry: Invariant) -> str:
    inner = getattr(entry, "_inner", None)
    return type(entry).__name__ + (f" of {type(inner).__name__}" if inner is not None else "")


def try_seed(trial: Trial, seed: int, row: Row) -> None:
    """Plays one seed, and notes what became of it."""
    roles, strategy = trial.layout.roles, trial.dry_run.strategy
    faults = faults_of(trial, seed)
    fatal = seed % ONE_IN == 0
    if fatal:
        needed = [rank for rank in range(roles.size) if not strategy.faults(WORKERS).survives(rank, roles)]
        faults = (*faults, drawn_death(needed, seed, STEPS * STEP_S))
    seen: Counter[type[Event]] = Counter()

    def hear(event: Event) -> None:
        seen[type(event)] += 1

    row.seeds += 1
    row.faults.update({fault.name for fault in faults})
    row.faults["kill needed"] += fatal
    try:
        play(replace(trial, faults=faults), seed, hear)
    except RunError as error:
        if fatal and DEATH_IS_NAMED in str(error):
            row.named_ends += 1
        else:
            failure = {"seed": seed, "strategy": str(strategy), "what": str(error)}
            row.failures.append(failure | {"faults": faults_text(faults)})
            print(f"  FAILED {failure} {faults_text(faults)}", flush=True)
    row.lost += seen[WorkerLost]
    row.joined += seen[WorkerJoined]


def row_of(name: str, seeds: int) -> Row:
    """Tries all seeds of a strategy."""
    specs = [name]
    if "servers" in type(strategy_of(name)).model_fields and "(" not in name:
        specs.append(f"{name}(servers=2)")
    trials = [trial_of(strategy_of(spec)) for spec in specs]
    row, began = Row(name, declared(strategy_of(name))), time.process_time()
    for seed in range(seeds):
        try_seed(trials[seed // ONE_IN % len(trials)], seed, row)
    row.seconds = time.process_time() - began
    return row


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown."""
    head = "strategy | seeds | kill | slow | delay | cut | lost | joined | a needed rank killed, and named | violations"
    lines = [f"| {head} |", "|---" * 10 + "|"]
    for row in rows:
        hit = [row.faults[kind] for kind in ("kill", "slow", "delay", "cut")]
        told = [row.seeds, *hit, row.lost, row.joined, f"{row.named_ends} of {row.faults['kill needed']}"]
        lines.append(f"| `{row.strategy}` | {' | '.join(map(str, told))} | {len(row.failures)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Tries all strategies, and writes what became of them."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--seeds", type=int, default=1000)
    options.add_argument("--only", nargs="*", default=None)
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    names = chosen.only or [*(name for family in FAMILIES for name in choices(family)), *ALSO]
    rows: list[Row] = []
    for name in names:
        rows.append(row_of(name, chosen.seeds))
        print(f"{rows[-1].seconds:6.1f} s {table(rows[-1:]).splitlines()[-1]}", flush=True)
        if chosen.out is not None:
            facts = {
                "command": " ".join(["python", *sys.argv]),
                "torch": torch.__version__,
                "workers": WORKERS,
                "steps": STEPS,
                "rows": [vars(row) for row in rows],
            }
            (chosen.out / "results.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    failed = sum(len(row.failures) for row in rows)
    print(f"{sum(row.seeds for row in rows):,} seeds, {failed} violations")
    sys.exit(failed > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

"""Trials on a small cluster whose steps take exponentially long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from conformance.jobs import strategy as strategy_of
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.simulation.injection.fault import parse_faults
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.trials import Trial
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.training.model_sizes import ModelSizes
from unit.simulation.clusters import cluster

STEP_S = 0.01


def trial(strategy: str | Strategy, *, workers: int = 4, steps: int = 20, **options: Any) -> Trial:
    """Makes a trial; a model of 400 kB takes a third of a mean step on the wire."""
    chosen = strategy_of(strategy) if isinstance(strategy, str) else strategy
    nic = {"latency_s": 1e-4, "bandwidth_bytes_per_s": 1.2e8}
    step_time = options.pop("step_time", f"exponential(mean={STEP_S})")
    hosts = (
        {"count": 1, "workers": workers} if chosen.traits(1).one_host else {"count": workers + 2, "cores": 8}
    )
    where = cluster(hosts, nic=nic, step_time=step_time)
    layout = lay_out(where, workers, chosen.traits(workers).servers, chosen.traits(workers).placement)
    sizes = ModelSizes((100_000,), (1.0,))
    dry_run = DryRun(strategy=chosen, workers=workers, steps=steps, sizes=sizes)
    if isinstance(options.get("faults"), str):
        options["faults"] = parse_faults(options["faults"])
    return Trial(layout=layout, dry_run=dry_run, **options)


def layers(spec: str, **options: Any) -> Trial:
    """Makes a trial of a model of three layers, a bucket each."""
    tried = trial(spec, steps=8, **options)
    sizes = ModelSizes((30_000, 30_000, 40_000), (0.3, 0.3, 0.4))
    return replace(tried, dry_run=replace(tried.dry_run, sizes=sizes))

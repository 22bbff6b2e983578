"""A worker is killed just before, and just after, arrivals of messages, with a successor and without.

A strategy with at most `RUNS` such kills is tried with all of them, others with as many, evenly chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

import sample
from polyrhythm.errors import RunError
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.simulation.cluster import Cluster
from polyrhythm.simulation.injection.faults.delay import Delay
from polyrhythm.simulation.injection.faults.kill import Kill
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.trials import Trial, faults_text, play
from polyrhythm.specs import build
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.training.model_sizes import ModelSizes
from polyrhythm.verification.invariant import Watch

WORKERS, STEPS, SEED = 3, 3, 1
SHORTLY = 1e-8
RUNS = 360
IN_SEVERAL_PARTS = ModelSizes((30_000, 30_000, 40_000), (0.3, 0.3, 0.4))
TOLD = Delay(seconds=1e-9, probability=1e-9)
"""A fault that changes nothing, and has arrivals be told."""
SPECS = [
    "synchronous",
    "synchronous(collective=ring)",
    "lazy_synchronous",
    "local_sgd(steps=2)",
    "diloco(steps=2)",
    "hierarchical_averaging(group=2, steps=1, steps_between=2)",
    "post_local_sgd(after=1, steps=2)",
    "sgp",
    "slowmo(steps=2, base=d_psgd)",
    "mixed(replicas=3)",
    "mixed(replicas=2, inside=local_sgd(steps=2))",
]


def trial_of(spec: str) -> Trial:
    strategy = build("strategy", spec, *FAMILIES)
    assert isinstance(strategy, Strategy)
    nic = {"latency_s": 1e-4, "bandwidth_bytes_per_s": 1.2e8}
    kind = {"name": "host", "count": WORKERS + 1, "cores": 8}
    where = Cluster(name="small", hosts=[kind], nic=nic, inside=nic, step_time="exponential(mean=0.01)")
    traits = strategy.traits(WORKERS)
    layout = lay_out(where, WORKERS, traits.servers, traits.placement)
    dry_run = DryRun(strategy=strategy, workers=WORKERS, steps=STEPS, sizes=IN_SEVERAL_PARTS)
    return Trial(layout=layout, dry_run=dry_run, faults=(TOLD,))


def kills(arrivals: list[float]) -> Iterator[Kill]:
    for at_s in arrivals:
        for rank in range(WORKERS):
            for restart_after_s in (0.0, None):
                for side in (-SHORTLY, SHORTLY):
                    yield Kill(rank=rank, at_s=at_s + side, restart_after_s=restart_after_s)


def complaint(trial: Trial, kill: Kill) -> str:
    """Return how a run ended that had to go on; empty: it went on, or nobody had what it needs."""
    try:
        play(replace(trial, faults=(kill,)), SEED, lambda event: None)
    except RunError as error:
        unheard = "before training has begun" in str(error)  # by any other worker
        ends = "the servers were being let go" in str(error)  # by worker 0 alone
        if kill.rank == 0 and (unheard or ends or kill.restart_after_s is None):
            return ""
        return f"{error} {faults_text((kill,))}"
    return ""


@pytest.mark.timeout(900)  # a thousand runs, where all tests are run
@pytest.mark.parametrize("spec", SPECS)
def test_the_run_goes_on_wherever_a_worker_dies(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trial, arrivals, delivered = trial_of(spec), set[float](), Watch.delivered

    def noting(watch: Watch, *args: object) -> object:
        arrivals.add(watch._now())
        return delivered(watch, *args)

    monkeypatch.setattr(Watch, "delivered", noting)
    play(trial, SEED, lambda event: None)
    monkeypatch.undo()
    assert len(arrivals) > STEPS
    planted = list(kills(sorted(arrivals)))
    every = max(1, len(planted) // RUNS) * (1 if sample.whole else 5)
    assert not [found for kill in planted[:: every | 1] if (found := complaint(trial, kill))]

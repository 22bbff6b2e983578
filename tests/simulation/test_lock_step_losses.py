"""Lock-step servers lose a worker: the others go on, and its successor takes the steps that were left behind them."""

from __future__ import annotations

import pytest

from conformance.jobs import blobs, make_job, result_of, strategy
from polyrhythm.events import RunEnded
from polyrhythm.simulation.trials import try_seeds
from sample import failures_of
from simulation.deaths import BATCH_SIZE, IMAGES, STEPS, WORKERS, events_of
from simulation.trying import trial

WHOLE_S = 0.25
MOMENTS = [round(WHOLE_S * number / 7, 5) for number in range(7)]
LOCK_STEP = [
    "parameter_server(consistency=synchronous)",
    "parameter_server(consistency=synchronous, servers=2)",
    "parameter_server(consistency=synchronous, servers=2, aggregator=coordinate_median(f=0))",
    "easgd(mode=synchronous, tau=2, servers=2)",
]


@pytest.mark.parametrize("pause_s", [None, 0.0005, 0.03])
@pytest.mark.parametrize("spec", LOCK_STEP)
def test_the_others_go_on_whenever_a_worker_dies(spec: str, pause_s: float | None) -> None:
    """Epochs end while the successor is behind: who leads waits for the others, and not for it."""
    for at_s in MOMENTS:
        comes = pause_s is not None and at_s + pause_s < 0.15
        events = events_of(
            make_job(spec, WORKERS, dataset=blobs(IMAGES), batch_size=BATCH_SIZE),
            [(at_s, 1)],
            [(at_s + pause_s, 1)] if comes and pause_s else [],
        )
        assert isinstance(events[-1], RunEnded)
        result = result_of(events)
        assert (events[-1].outcome, result["steps"]) == ("done", STEPS)
        assert result["workers_joined"] == int(comes)
        if comes:
            assert result["images_not_seen"] == 0
            assert sum(result["staleness"]["histogram"].values()) >= STEPS * WORKERS
        elif result["workers_lost"]:
            assert result["images_not_seen"] > 0


@pytest.mark.parametrize("spec", LOCK_STEP)
def test_every_gradient_counts_once_under_many_seeds(spec: str) -> None:
    assert failures_of(trial(spec, steps=8), range(16)) == ()


def test_a_successor_comes_in_where_a_server_has_had_one_too() -> None:
    """Server 4's successor follows; what a worker's successor says to the other one is acknowledged as such."""
    spec = "parameter_server(consistency=synchronous, servers=2, replicas=2)"
    faults = (
        "kill(rank=1, after_step=2, restart_after_s=0.0129); kill(rank=5, at_s=0.0147, restart_after_s=0.003); "
        "kill(rank=4, at_s=0.073, restart_after_s=0.0063)"
    )
    assert try_seeds(trial(spec, steps=8, faults=faults), [28]).failures == ()


@pytest.mark.parametrize(
    ("aggregator", "workers", "spared"),
    [
        ("krum", 8, 3),
        ("multi_krum(m=4)", 8, 1),
        ("bulyan", 8, 1),
        ("coordinate_median(f=2)", 8, 3),
        ("trimmed_mean(k=3)", 8, 1),
        ("coordinate_median", 3, 0),
        ("weighted_mean", 3, 2),
    ],
)
def test_a_robust_aggregator_bears_as_many_losses_as_it_may(
    aggregator: str, workers: int, spared: int
) -> None:
    """What is left must be 2f + 3 gradients for Krum, 4f + 3 for Bulyan, 2f + 1 for the median and the trimmed mean."""
    chosen = strategy(f"parameter_server(consistency=synchronous, aggregator={aggregator})")
    assert min(chosen.faults(workers).spares, workers - 1) == spared
    assert chosen.faults(workers).continues == (spared > 0)


def test_too_few_gradients_for_a_robust_aggregator_end_the_run_with_a_line() -> None:
    spec = "parameter_server(consistency=synchronous, aggregator=krum)"
    kills = "; ".join(f"kill(rank={rank}, at_s=0.05)" for rank in (1, 2))
    tried = try_seeds(trial(spec, workers=6, faults=kills), [0])
    (failure,) = tried.failures
    assert "2 workers are lost (ranks 1, 2), and krum can spare 1: continue with --resume" in failure.what

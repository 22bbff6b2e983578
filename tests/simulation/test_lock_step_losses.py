"""Lock-step servers lose a worker: the others go on, and its successor takes the steps that were left behind them."""

from __future__ import annotations

import pytest

from conformance.jobs import blobs, make_job, result_of, strategy
from polyrhythm.events import RunEnded
from polyrhythm.simulation.trials import try_seeds
from simulation.test_lost_workers import BATCH_SIZE, IMAGES, STEPS, WORKERS, events_of
from simulation.trying import trial

WHOLE_S = 0.25
MOMENTS = [round(WHOLE_S * number / 7, 5) for number in range(7)]
LOCK_STEP = ["parameter_server(consistency=synchronous)", "easgd(mode=synchronous, tau=2)"]


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
    tried = try_seeds(trial(spec, steps=8), range(16))
    assert (tried.seeds, tried.failures) == (16, ())


@pytest.mark.parametrize(
    "spec",
    [
        "parameter_server(consistency=synchronous, servers=2)",
        "parameter_server(consistency=synchronous, aggregator=coordinate_median)",
        "easgd(mode=synchronous, servers=2)",
    ],
)
def test_with_several_servers_or_a_robust_aggregator_lock_step_stops(spec: str) -> None:
    """Two successors, of which one server counts one's step and the other the other's, would wait in a circle."""
    assert not strategy(spec).goes_on(4)
    assert all(strategy(each).goes_on(4) and not strategy(each).spares_leader(4) for each in LOCK_STEP)

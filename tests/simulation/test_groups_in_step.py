"""Groups that go in step with each other, or the only one there is, lose members and worker 0, and go on."""

from __future__ import annotations

import pytest

from conformance.jobs import result_of, strategy
from polyrhythm.events import Evaluated
from sample import failures_of
from simulation.test_lost_leader import EPOCHS, STEPS, events_of, job_of, of
from simulation.trying import trial

IN_STEP = [
    "mixed(replicas=6)",
    "mixed(replicas=6, servers=2)",
    "mixed(replicas=3, servers=2, consistency=synchronous)",
    "mixed(replicas=2, consistency=bounded_staleness(s=0))",
    "mixed(replicas=1, consistency=synchronous)",
]


@pytest.mark.parametrize("spec", IN_STEP)
def test_every_gradient_counts_once_under_many_seeds(spec: str) -> None:
    assert failures_of(trial(spec, workers=6, steps=6), range(6)) == ()


@pytest.mark.parametrize(
    ("spec", "faults"),
    [
        ("mixed(replicas=3)", ["kill(rank=0, at_s=7.98, restart_after_s=0)"]),
        (
            "mixed(replicas=3, servers=2)",
            ["kill(rank=0, at_s=8.01, restart_after_s=0.7)", "kill(rank=1, at_s=13)"],
        ),
        ("mixed(servers=2, consistency=synchronous)", ["kill(rank=0, at_s=4.05, restart_after_s=2)"]),
        (
            "mixed(servers=2, consistency=synchronous)",
            ["kill(rank=2, at_s=3.9, restart_after_s=0.3)", "kill(rank=0, at_s=11, restart_after_s=0)"],
        ),
    ],
)
def test_epochs_are_tested_and_all_images_seen_whoever_dies(spec: str, faults: list[str]) -> None:
    """Who leads waits at the end of an epoch for all whose groups have lost nobody; worker 2 is a group of its own."""
    events = events_of(job_of(spec), *faults, latency_s=0.01)
    found = result_of(events)
    assert found["workers_lost"] == len(faults)
    assert (found["steps"], found["images_not_seen"], found["messages_refused"]) == (STEPS, 0, {})
    assert [event.epoch for event in of(Evaluated, events)] == list(range(1, EPOCHS + 1))


def test_groups_that_go_in_step_spare_whom_free_ones_do() -> None:
    assert all(strategy(spec).faults(6).continues and strategy(spec).faults(6).leader for spec in IN_STEP)
    assert [strategy(spec).faults(6).spares for spec in IN_STEP] == [5] * len(IN_STEP)
    assert not strategy("mixed(replicas=6)").faults(1).continues

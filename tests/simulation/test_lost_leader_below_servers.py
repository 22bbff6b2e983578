"""Worker 0 is killed where its leaf or its site has been asked for the final parameters: its successor asks again."""

from __future__ import annotations

import pytest

from conformance.jobs import result_of
from polyrhythm.events import Evaluated, RunEnded, WorkerLost
from sample import failures_of
from simulation.test_lost_leader import EPOCHS, STEPS, events_of, job_of, of
from simulation.trying import trial

SPECS = ["hierarchical", "hierarchical(servers=2, consistency=asynchronous)", "gaia", "gaia(servers=2)"]
SLOW = "slow(rank=2, factor=2, from_s=0, to_s=1000)"


@pytest.mark.parametrize(("spec", "at_s"), [(SPECS[1], 25), (SPECS[2], 36), (SPECS[3], 55)])
def test_worker_0_dies_when_it_is_through_and_waits_for_others(spec: str, at_s: int) -> None:
    """Worker 2 has a leaf or a site of its own, and is half as fast; a site may be four rounds behind."""
    events = events_of(job_of(spec), SLOW, f"kill(rank=0, at_s={at_s}, restart_after_s=0.5)")
    found = result_of(events)
    assert [event.step for event in of(WorkerLost, events)] == [STEPS]
    assert (found["workers_joined"], found["images_not_seen"], found["messages_refused"]) == (1, 0, {})
    assert found["seconds"] > at_s + 1


@pytest.mark.parametrize(
    ("spec", "at_s", "pause_s"),
    [("hierarchical", 5.5, 0.0), ("gaia", 13.1, 0.7), ("hierarchical", 15.97, 0.2)],
)
def test_its_successor_goes_on_where_its_group_is(spec: str, at_s: float, pause_s: float) -> None:
    events = events_of(job_of(spec), f"kill(rank=0, at_s={at_s}, restart_after_s={pause_s})")
    found, tested = result_of(events), [event.epoch for event in of(Evaluated, events)]
    assert (found["workers_lost"], found["workers_joined"], found["steps"]) == (1, 1, STEPS)
    assert tested == sorted(set(tested))
    assert tested[-1] == EPOCHS
    assert len(of(RunEnded, events)) == 1
    assert found["messages_refused"] == {}


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_declared_holds_under_many_seeds(spec: str) -> None:
    """Every other one lets worker 0 die after some step."""
    assert failures_of(trial(spec, steps=8), range(8)) == ()

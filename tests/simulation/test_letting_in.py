"""Workers that go in step let a successor in between two steps, and lose none of theirs by it."""

from __future__ import annotations

import pytest

from conformance.jobs import result_of
from simulation.test_lost_leader_in_step import STEPS, events_of, job_of

LEADER_RETURNS = "kill(rank=0, at_s=1000, restart_after_s=1)"
"""After the end; so others listen for a leader's word between steps, as they do on real machines."""


def seconds(spec: str, *faults: str, leader_returns: bool = True) -> float:
    """Gives how long a run takes of which a step takes a second."""
    result = result_of(events_of(job_of(spec), *faults, *([LEADER_RETURNS] if leader_returns else [])))
    assert result["steps"] == STEPS
    assert result["workers_joined"] == len(faults)
    return float(result["seconds"])


@pytest.mark.parametrize("comes_after_s", [0.01, 1.0, 1.5, 2.2])
@pytest.mark.parametrize(("spec", "again_s"), [("synchronous", 1.0), ("d_psgd", 0.0)])
def test_at_most_the_step_in_which_a_worker_died_is_taken_again(
    spec: str, again_s: float, comes_after_s: float
) -> None:
    """In turns not even that: a turn is taken again with the gradient that is there."""
    kill = f"kill(rank=2, at_s=4.5, restart_after_s={comes_after_s})"
    assert seconds(spec, kill) - seconds(spec) == pytest.approx(again_s, abs=0.02)


def test_where_nobody_listens_they_lose_a_step() -> None:
    kill = "kill(rank=2, at_s=4.5, restart_after_s=1.5)"
    lost_s = seconds("synchronous", kill, leader_returns=False) - seconds("synchronous", leader_returns=False)
    assert lost_s == pytest.approx(2.0, abs=0.02)


def test_one_that_dies_before_it_is_let_in_holds_nobody_up() -> None:
    kill, again = (f"kill(rank=2, at_s={at_s}, restart_after_s=1)" for at_s in (4.5, 6.5))
    assert seconds("synchronous", kill, again) == pytest.approx(seconds("synchronous", kill), abs=0.02)

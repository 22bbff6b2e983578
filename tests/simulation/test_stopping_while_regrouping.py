"""A run is asked to stop while workers are lost and come back: it ends, and nobody goes on alone."""

from __future__ import annotations

import pytest

from polyrhythm.events import Event, RunEnded, WorkerLost
from polyrhythm.roles.world import StopWish
from polyrhythm.simulation.trials import play
from simulation.trying import trial

FAULTS = "kill(rank=2, at_s=0.04, restart_after_s=0.01); kill(rank=1, at_s=0.05, restart_after_s=0.01)"


@pytest.mark.parametrize(
    "spec", ["synchronous(collective=ring)", "local_sgd(steps=3)", "d_psgd", "slowmo(steps=3, base=sgp)"]
)
def test_a_wish_to_stop_is_heard_by_those_who_are_left_and_by_those_who_come(spec: str) -> None:
    """Successors are let in before the last step, and when the others have left it behind them."""
    outcomes = set()
    for seed in range(12):
        events: list[Event] = []
        stop = StopWish()

        def hear(event: Event, events: list[Event] = events, stop: StopWish = stop) -> None:
            events.append(event)
            if isinstance(event, WorkerLost):
                stop.wish()

        play(trial(spec, steps=40, faults=FAULTS), seed, hear, stop=stop)
        assert isinstance(events[-1], RunEnded)
        outcomes.add(events[-1].outcome)
    assert outcomes == {"interrupted"}

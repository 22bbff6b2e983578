"""Hogwild's workers are killed in virtual time: the vector stays, and holds every step of every worker once."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.jobs import result_of
from polyrhythm.errors import RunError
from polyrhythm.events import WorkerJoined, WorkerLost
from polyrhythm.simulation.trials import play
from polyrhythm.strategies.parameter_server.hogwild import HogwildWorker
from polyrhythm.verification.invariant import Violation
from sample import failures_of
from simulation.lost_leaders import LENGTH, WORKERS, events_of, job_of, of
from simulation.trying import trial

EPOCHS = 3
STEPS = EPOCHS * LENGTH


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_every_step_is_in_the_vector_once_whoever_dies(workers: int) -> None:
    assert failures_of(trial("hogwild", workers=workers), range(25)) == ()


def test_a_successor_that_takes_a_step_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = trial("hogwild", workers=3, faults="kill(rank=1, after_step=5, restart_after_s=0.02)")
    play(tried, 0, lambda event: None)
    before = HogwildWorker.start

    def planted(self: HogwildWorker, step: int) -> int:
        return max(0, before(self, step) - 1)

    monkeypatch.setattr(HogwildWorker, "start", planted)
    with pytest.raises(Violation, match="updates of rank 1 at the end"):
        play(tried, 0, lambda event: None)


@pytest.mark.parametrize("victim", range(WORKERS))
@pytest.mark.parametrize("moment", [0.5, 4.3, 10.9])
def test_the_others_go_on_and_a_successor_takes_the_steps_that_are_left(victim: int, moment: float) -> None:
    """A step takes a second, and nobody waits for anybody; the one under way is taken again."""
    fault = f"kill(rank={victim}, at_s={moment}, restart_after_s=0.5)"
    events = events_of(job_of("hogwild", epochs=EPOCHS), fault)
    found = result_of(events)
    assert [event.worker for event in of(WorkerLost, events)] == [victim]
    assert [event.worker for event in of(WorkerJoined, events)] == [victim]
    assert (found["steps"], found["images_not_seen"]) == (STEPS, 0)
    assert STEPS < found["seconds"] < STEPS + 3


def test_without_a_successor_the_others_take_their_own_steps() -> None:
    events = events_of(job_of("hogwild", epochs=EPOCHS), "kill(rank=2, at_s=4.5)")
    found = result_of(events)
    assert (found["workers_lost"], found["workers_joined"], found["steps"]) == (1, 0, STEPS)
    assert found["images_not_seen"] == (STEPS - 4) * 4
    assert found["seconds"] == pytest.approx(STEPS, rel=0.01)


def test_the_vector_is_handed_on_from_successor_to_successor() -> None:
    """Nobody is left in the end of those who were there when it was made."""
    faults = [f"kill(rank={rank}, at_s={2.2 + 2 * rank}, restart_after_s=0.3)" for rank in (2, 1, 0)]
    found = result_of(events_of(job_of("hogwild", epochs=EPOCHS), *faults))
    assert (found["workers_lost"], found["workers_joined"], found["images_not_seen"]) == (3, 3, 0)
    assert found["test_top1"] > 0.5


def test_when_all_who_had_the_vector_are_lost_the_run_says_so() -> None:
    faults: list[Any] = [f"kill(rank={rank}, at_s=3.5, restart_after_s=0.5)" for rank in range(WORKERS)]
    with pytest.raises(RunError, match="looking for the vector that all workers share"):
        events_of(job_of("hogwild", epochs=EPOCHS), *faults)

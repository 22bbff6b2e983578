"""Reports and states at the end of an epoch travel along a tree of the members, also where one of them dies then."""

from __future__ import annotations

from collections import Counter

import pytest

from conformance.jobs import blobs, make_job, result_of
from polyrhythm.events import Evaluated, Event, WorkerProgress
from polyrhythm.roles import tree_of_members
from polyrhythm.roles.job import Job
from polyrhythm.roles.leading.leader import Leader
from simulation.deaths import events_of

WORKERS, LENGTH = 4, 5


def job() -> Job:
    return make_job("synchronous", WORKERS, dataset=blobs(train=4 * LENGTH * WORKERS, test=6), epochs=2)


def steps_reported(events: list[Event]) -> Counter[int]:
    steps = Counter[int]()
    for event in events:
        if isinstance(event, WorkerProgress):
            steps[event.worker] += event.steps
    return steps


def epochs_tested(events: list[Event]) -> list[int]:
    return [event.epoch for event in events if isinstance(event, Evaluated)]


def test_the_coordinator_gets_the_same_along_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    direct, senders = events_of(job()), Counter[int]()
    take = Leader._take_gathered

    def counted(leader: Leader, gathered: object) -> None:
        senders.update(worker for worker, *_ in gathered.senders)  # type: ignore[attr-defined]
        take(leader, gathered)  # type: ignore[arg-type]

    monkeypatch.setattr(Leader, "_take_gathered", counted)
    monkeypatch.setattr(tree_of_members, "FAN", 1)
    events = events_of(job())
    assert senders == dict.fromkeys(range(1, WORKERS), 2)
    assert steps_reported(events) == steps_reported(direct) == dict.fromkeys(range(WORKERS), 2 * LENGTH)
    assert result_of(events)["parameters_sha256"] == result_of(direct)["parameters_sha256"]


@pytest.mark.parametrize("victim", range(1, WORKERS))
def test_a_death_at_the_end_of_an_epoch_costs_no_report_and_no_state(
    victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_of_members, "FAN", 1)
    whole = events_of(job())
    [ended_s, _] = [event.time_s for event in whole if isinstance(event, Evaluated)]
    for number in range(24):
        at_s = ended_s - 0.01 + number * 0.0005
        events = events_of(job(), [(at_s, victim)], [(at_s + 0.002, victim)])
        assert epochs_tested(events) == [1, 2], at_s
        assert result_of(events)["steps"] == 2 * LENGTH, at_s
        steps = steps_reported(events)
        del steps[victim]
        assert set(steps.values()) == {2 * LENGTH}, (at_s, steps)

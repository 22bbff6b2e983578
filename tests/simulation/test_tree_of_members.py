"""Reports and states at the end of an epoch, and states of checkpoints within one, travel along a tree of the members,
also where one of them dies then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.jobs import blobs, make_job, result_of
from polyrhythm.events import CheckpointSaved, Evaluated, Event, WorkerProgress
from polyrhythm.roles import tree_of_members
from polyrhythm.roles.checkpoint_interval import Interval
from polyrhythm.roles.checkpointing.archive import FOLDER
from polyrhythm.roles.job import Job
from polyrhythm.roles.leading.leader import Leader
from polyrhythm.training.checkpoint import checkpoints, load_checkpoint
from simulation.deaths import events_of

WORKERS, LENGTH = 4, 5


def job() -> Job:
    return make_job("synchronous", WORKERS, dataset=blobs(train=4 * LENGTH * WORKERS, test=6), epochs=2)


def saving(folder: Path, every: str) -> Job:
    whole = job()
    kept = replace(whole.checkpointing, folder=folder, checkpoints=99, every=Interval.parse(every))
    return replace(whole, checkpointing=kept)


def states_saved(folder: Path) -> Iterator[tuple[int, set[int], set[int]]]:
    """Gives the step of every checkpoint, its workers, and the steps of their states."""
    for path in checkpoints(folder / FOLDER):
        facts = load_checkpoint(path)[1]
        workers = facts["workers"]
        steps = {entry["account"]["step"] for entry in workers.values()}
        yield facts["step"], {int(worker) for worker in workers}, steps


def steps_reported(events: list[Event]) -> Counter[int]:
    steps = Counter[int]()
    for event in events:
        if isinstance(event, WorkerProgress):
            steps[event.worker] += event.steps
    return steps


def epochs_tested(events: list[Event]) -> list[int]:
    return [event.epoch for event in events if isinstance(event, Evaluated)]


def senders_gathered(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Counts how often the coordinator gets gathered messages of each worker, from now on."""
    senders, take = Counter[int](), Leader._take_gathered

    def counted(leader: Leader, gathered: object) -> None:
        senders.update(worker for worker, *_ in gathered.senders)  # type: ignore[attr-defined]
        take(leader, gathered)  # type: ignore[arg-type]

    monkeypatch.setattr(Leader, "_take_gathered", counted)
    return senders


def test_the_coordinator_gets_the_same_along_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    direct, senders = events_of(job()), senders_gathered(monkeypatch)
    monkeypatch.setattr(tree_of_members, "FAN", 1)
    events = events_of(job())
    assert senders == dict.fromkeys(range(1, WORKERS), 2)
    assert steps_reported(events) == steps_reported(direct) == dict.fromkeys(range(WORKERS), 2 * LENGTH)
    assert result_of(events)["parameters_sha256"] == result_of(direct)["parameters_sha256"]


def test_states_of_checkpoints_within_epochs_travel_along_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct, senders = events_of(saving(tmp_path / "direct", "2steps")), senders_gathered(monkeypatch)
    monkeypatch.setattr(tree_of_members, "FAN", 1)
    events = events_of(saving(tmp_path / "tree", "2steps"))
    assert senders == dict.fromkeys(range(1, WORKERS), 6)  # of two ends of epochs, and of steps 2, 4, 6 and 8
    assert result_of(events)["parameters_sha256"] == result_of(direct)["parameters_sha256"]
    found = list(states_saved(tmp_path / "tree"))
    assert found == list(states_saved(tmp_path / "direct"))
    assert all(workers == {*range(WORKERS)} and steps == {step} for step, workers, steps in found)


def test_states_that_are_requested_do_not_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders = senders_gathered(monkeypatch)
    monkeypatch.setattr(tree_of_members, "FAN", 1)
    events = events_of(saving(tmp_path, "0.03s"))
    assert sum(isinstance(event, CheckpointSaved) for event in events) > 2
    assert senders == dict.fromkeys(range(1, WORKERS), 2)


@pytest.mark.parametrize("victim", range(1, WORKERS))
def test_a_death_around_a_checkpoint_within_an_epoch(
    victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_of_members, "FAN", 1)
    whole = events_of(saving(tmp_path / "whole", "2steps"))
    at_begin_s = next(event.time_s for event in whole if isinstance(event, CheckpointSaved))
    for number in range(8):
        folder, at_s = tmp_path / str(number), at_begin_s - 0.012 + number * 0.002
        events = events_of(saving(folder, "2steps"), [(at_s, victim)], [(at_s + 0.002, victim)])
        assert result_of(events)["steps"] == 2 * LENGTH, at_s
        found = list(states_saved(folder))
        assert {step for step, *_ in found} >= {2 * LENGTH, 8}, at_s
        assert all(steps == {step} for step, _, steps in found), at_s


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

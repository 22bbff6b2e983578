"""Groups of mixed mode lose members, and get them back, at every moment of a run: they regroup inside and push on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conformance.jobs import blobs, make_job, result_of, strategy
from polyrhythm.events import Event, RunEnded, WorkerProgress
from polyrhythm.roles.job import FaultTolerance, Job
from polyrhythm.simulation.trials import try_seeds
from polyrhythm.strategies.parameter_server.groups.group_server import GroupServer
from polyrhythm.strategies.parameter_server.mixed import Gradients, Models
from polyrhythm.strategies.parameter_server.serving.rule import Reply
from simulation.deaths import events_of
from simulation.trying import trial

WORKERS, IMAGES, BATCH_SIZE = 4, 70, 4
LENGTH = 5  # steps of an epoch; 70 images are 4 full steps of 16, and 6 are left for the last one
STEPS = 2 * LENGTH
WHOLE_S = 0.25
MOMENTS = [round(WHOLE_S * number / 6, 5) for number in range(6)]
FREE = [
    "mixed(replicas=2)",
    "mixed(replicas=3, servers=2)",
    "mixed(replicas=2, servers=2, consistency=bounded_staleness(s=1))",
    "mixed(replicas=3, consistency=softsync)",
    "mixed(replicas=2, consistency=backup(spare=1))",
    "mixed(replicas=3, inside=synchronous(collective=ring))",
]


def job_of(spec: str = "mixed(replicas=2, servers=2)", fault_tolerance: FaultTolerance | None = None) -> Job:
    job = make_job(spec, WORKERS, dataset=blobs(IMAGES), batch_size=BATCH_SIZE)
    return job if fault_tolerance is None else replace(job, fault_tolerance=fault_tolerance)


def steps_by(events: list[Event], worker: int) -> list[int]:
    return [event.step for event in events if isinstance(event, WorkerProgress) and event.worker == worker]


def gradients(events: list[Event]) -> int:
    """Counts those that groups pushed and servers applied, on both shards."""
    return sum(result_of(events)["staleness"]["histogram"].values())


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("at_s", MOMENTS)
def test_a_group_goes_on_without_a_member_and_sees_all_its_images(rank: int, at_s: float) -> None:
    """Rank 2 speaks for its group; what it had pushed counts once on both servers."""
    events = events_of(job_of(), [(at_s, rank)])
    result = result_of(events)
    assert isinstance(events[-1], RunEnded)
    assert (events[-1].outcome, result["steps"], result["images_not_seen"]) == ("done", STEPS, 0)
    assert gradients(events) == 2 * 2 * STEPS
    assert all(steps_by(events, worker)[-1] == STEPS for worker in range(WORKERS) if worker != rank)


@pytest.mark.parametrize("pause_s", [0.0005, 0.03])
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("at_s", MOMENTS[::2])
def test_a_successor_is_let_in_between_two_steps(rank: int, pause_s: float, at_s: float) -> None:
    events = events_of(job_of(), [(at_s, rank)], [(at_s + pause_s, rank)])
    result = result_of(events)
    assert (result["steps"], result["images_not_seen"]) == (STEPS, 0)
    assert gradients(events) == 2 * 2 * STEPS
    if at_s + pause_s < WHOLE_S / 2:
        assert result["workers_joined"] == 1
        assert steps_by(events, rank)[-1] == STEPS


@pytest.mark.parametrize("at_s", MOMENTS[1::2])
def test_a_group_that_all_are_lost_of_is_as_a_lost_worker(at_s: float) -> None:
    """The other group goes on; a successor of either takes the steps that are left of both."""
    events = events_of(job_of(), [(at_s, 2), (at_s + 0.001, 3)])
    result = result_of(events)
    done = gradients(events) / 2 - STEPS
    assert result["workers_lost"] in (0, 2)
    assert (done == STEPS) == (result["images_not_seen"] == 0)
    back = events_of(job_of(), [(at_s, 2), (at_s + 0.001, 3)], [(at_s + 0.01, 3)])
    if result_of(back)["workers_joined"]:
        assert (gradients(back), result_of(back)["images_not_seen"]) == (2 * 2 * STEPS, 0)


def test_rescaling_leaves_the_share_of_a_lost_member_out() -> None:
    events = events_of(job_of(fault_tolerance=FaultTolerance(rescale=True)), [(0.06, 3)])
    missing = result_of(events)["images_not_seen"]
    assert 0 < missing < 2 * (4 * BATCH_SIZE + 1)
    assert gradients(events) == 2 * 2 * STEPS


@pytest.mark.parametrize("spec", FREE)
def test_every_gradient_counts_once_under_many_seeds(spec: str) -> None:
    tried = try_seeds(trial(spec, workers=6, steps=6), range(12))
    assert (tried.seeds, tried.failures) == (12, ())


def test_a_step_that_a_new_speaker_leaves_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    regroup = Gradients.regroup
    monkeypatch.setattr(Gradients, "regroup", lambda self, found: regroup(self, found) + 1)
    assert try_seeds(trial("mixed(replicas=3)", workers=6, steps=6), range(8)).failures


def test_a_step_that_counts_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = GroupServer._begin_to_speak

    def forgetful(self: GroupServer, name: int, source: int) -> list[Reply]:
        held = self._session._held
        held.steps = [max(0, steps - (rank == name)) for rank, steps in self._session.steps.items()]
        return begin(self, name, source)

    monkeypatch.setattr(GroupServer, "_begin_to_speak", forgetful)
    assert try_seeds(trial("mixed(replicas=3)", workers=6, steps=6), range(8)).failures


def test_groups_that_push_rounds_stop() -> None:
    assert not strategy("mixed(inside=local_sgd)").faults(4).goes_on
    assert all(strategy(spec).faults(4).goes_on and strategy(spec).faults(4).leader for spec in FREE)
    assert strategy(FREE[4]).faults(4).spares == 1

"""Workers that are killed in virtual time, at every moment of a run, with and without a successor."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from conformance.jobs import (
    blobs,
    make_job,
    perceptron,
    result_of,
    resumed,
    strategy,
    with_batch_norm,
)
from polyrhythm.data.dealing import batch_indices
from polyrhythm.errors import PeerLost, RunError
from polyrhythm.events import (
    CheckpointSaved,
    Event,
    ServerProgress,
    WorkerJoined,
    WorkerLost,
    WorkerProgress,
)
from polyrhythm.roles import member
from polyrhythm.roles.job import FaultTolerance
from polyrhythm.simulation.run import job_program, simulate
from polyrhythm.simulation.simulated_run import constant_run
from polyrhythm.strategies.role_assignment import roles_in_order
from simulation.deaths import AROUND, BATCH_SIZE, IMAGES, LENGTH, STEPS, WHOLE_S, WORKERS, events_of

SERVERS = 2
MOMENTS = [round(WHOLE_S * number / 36, 5) for number in range(36)]


def job_of(spec="parameter_server(servers=2)", model=perceptron, **learning):
    return make_job(spec, WORKERS, model=model, dataset=blobs(IMAGES), batch_size=BATCH_SIZE, **learning)


def gradients(result):
    return sum(result["staleness"]["histogram"].values()) / SERVERS


def batches(worker, step):
    """Gives the sizes of a worker's batches from a step on."""
    return [
        len(batch_indices(torch.arange(IMAGES), number % LENGTH, worker, WORKERS, BATCH_SIZE))
        for number in range(step, STEPS)
    ]


def steps_by(events, worker):
    return [event.step for event in events if isinstance(event, WorkerProgress) and event.worker == worker]


@pytest.mark.parametrize("at_s", MOMENTS)
def test_the_others_go_on_whenever_a_worker_dies(at_s):
    events = events_of(job_of(), [(at_s, 1)])
    result = result_of(events)
    assert events[-1].outcome == "done"
    assert steps_by(events, 0)[-1] == steps_by(events, 2)[-1] == STEPS
    done = round(gradients(result)) - 2 * STEPS
    if any(isinstance(event, WorkerLost) for event in events):
        assert result["workers_lost"] == 1
        # both servers hold the same steps, or one more that the other has not heard
        assert gradients(result) * SERVERS - SERVERS * (done + 2 * STEPS) in (-1, 0, 1)
        assert result["images_not_seen"] in (sum(batches(1, done)), sum(batches(1, done - 1)))
    else:
        assert done == STEPS  # it had said its last words
        assert result["images_not_seen"] == 0


@pytest.mark.parametrize("pause_s", [0.0005, 0.03])
@pytest.mark.parametrize("at_s", MOMENTS)
def test_a_successor_does_what_was_left_and_nothing_twice(at_s, pause_s):
    events = events_of(job_of(), [(at_s, 1)], [(at_s + pause_s, 1)])
    result = result_of(events)
    assert events[-1].outcome == "done"
    joined = [event for event in events if isinstance(event, WorkerJoined)]
    if joined or not result["workers_lost"]:
        assert gradients(result) == 3 * STEPS
        assert result["images_not_seen"] == 0
    else:  # all the others were through before it came
        assert at_s + pause_s > events[-1].time_s - 0.02


@pytest.mark.parametrize("spec", ["ssp(s=1)", "ssp(s=2, servers=2)"])
def test_a_successor_of_bounded_staleness_ends_beside_those_who_wait_for_it(spec):
    """It comes when the others are nearly through; they stay at their last step until it has taken all of its own."""
    result = result_of(events_of(job_of(spec), [(0.03, 1)], [(0.15, 1)]))
    assert (result["workers_lost"], result["workers_joined"], result["images_not_seen"]) == (1, 1, 0)
    assert (
        sum(result["staleness"]["histogram"].values()) == 3 * STEPS * strategy(spec).traits(WORKERS).servers
    )


def test_all_but_the_leader_may_be_lost_and_more_than_once():
    kills = [(0.03, 1), (0.031, 2), (0.06, 1), (0.09, 2)]
    events = events_of(job_of(), kills, [(0.05, 1), (0.055, 2), (0.08, 1), (0.1, 2)])
    result = result_of(events)
    assert (result["workers_lost"], result["workers_joined"]) == (4, 4)
    assert gradients(result) == 3 * STEPS


def test_the_same_losses_give_the_same_parameters():
    digests = {
        result_of(events_of(job_of(), [(0.05, 1)], [(0.08, 1)]))["parameters_sha256"] for _ in range(2)
    }
    assert len(digests) == 1
    assert digests != {result_of(events_of(job_of(), []))["parameters_sha256"]}


def test_a_successor_takes_the_leaders_batch_norm_statistics():
    job = job_of(model=with_batch_norm)
    models, given = [], []

    def make():
        models.append(job.make_model())
        return models[-1]

    def note(replica, untrained):
        load(replica, untrained)
        given.append((untrained["1.num_batches_tracked"], models[-1][1].running_mean.clone()))

    load = member.load_untrained
    with mock.patch.object(member, "load_untrained", note):
        events = events_of(replace(job, make_model=make), [(0.05, 1)], [(0.08, 1)])
    assert [count.item() for count, _ in given[:2]] == [0, 0]  # all workers are given worker 0's at the start
    count, mean = given[2]
    assert 0 < count < STEPS
    assert mean.abs().min() > 0
    (joined,) = [event for event in events if isinstance(event, WorkerJoined)]
    own = [event.steps for event in events if isinstance(event, WorkerProgress) and event.worker == 1]
    assert joined.time_s >= 0.08
    assert models[WORKERS][1].num_batches_tracked == count + sum(own[-2:])
    assert result_of(events)["images_not_seen"] == 0


EARLY = [0.0, 0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.004, 0.005]


@pytest.mark.parametrize("at_s", EARLY)
def test_a_worker_may_die_while_all_get_ready(at_s):
    events = events_of(job_of(model=with_batch_norm), [(at_s, 1)], [(at_s + 0.02, 1)])
    assert result_of(events)["workers_joined"] == 1
    assert gradients(result_of(events)) == 3 * STEPS


@pytest.mark.parametrize("at_s", EARLY)
def test_a_worker_may_die_while_a_run_is_resumed(at_s, tmp_path):
    job = make_job("parameter_server(servers=2)", WORKERS, batch_size=BATCH_SIZE, folder=tmp_path)
    stopped = simulate(job, replace(AROUND, stop_at_s=0.06))
    assert stopped[-1].outcome == "interrupted"
    assert 0 < gradients(result_of(stopped)) < 3 * STEPS
    events = events_of(resumed(job), [(at_s, 1)], [(at_s + 0.02, 1)])
    assert result_of(events)["workers_joined"] == 1
    assert gradients(result_of(events)) == 3 * STEPS
    without = events_of(resumed(job), [(at_s, 2)])
    assert without[-1].outcome == "done"


@pytest.mark.parametrize(
    ("spec", "rank"),
    [
        ("parameter_server(servers=2)", 0),
        ("parameter_server(servers=2)", 3),
        *(("parameter_server(consistency=synchronous, servers=2)", rank) for rank in (0, 3)),
        ("mixed(replicas=2, consistency=synchronous)", 0),
        *(("hybrid", rank) for rank in (0, 1, 2)),
        ("synchronous", 0),
    ],
)
def test_what_cannot_go_on_ends_with_the_loss(spec, rank):
    with pytest.raises(PeerLost) as caught:
        events_of(job_of(spec), [(0.05, rank)])
    assert caught.value.rank in (rank, 0, 1, 2)  # the first to hear of it, or its echo


@pytest.mark.parametrize("successors", [False, True])
def test_with_too_few_workers_the_run_ends_with_a_checkpoint(successors, tmp_path):
    """Also where a successor comes all the same, for which the run has not asked."""
    job = make_job("parameter_server", WORKERS, dataset=blobs(IMAGES), batch_size=BATCH_SIZE, folder=tmp_path)
    events: list[Event] = []
    with pytest.raises(
        RunError, match=r"^2 of 3 workers remain, and min_workers is 3; continue with --resume"
    ):
        _collect(replace(job, fault_tolerance=FaultTolerance(min_workers=3)), events, successors=successors)
    assert sum(isinstance(event, WorkerJoined) for event in events) == successors
    saved = [event for event in events if not isinstance(event, ServerProgress)][-1]
    assert isinstance(saved, CheckpointSaved)
    assert 0 < saved.step < STEPS


def _collect(job, events, *, successors=False):
    roles = roles_in_order(job.workers, job.traits.servers)
    stage = constant_run(roles, job_program(job), events.append, AROUND)
    stage.time.at(0.03, lambda: stage.cluster.kill(1))
    if successors:
        stage.time.at(0.03, lambda: stage.cluster.replace(1))
        stage.time.at(0.03, lambda: stage.spawn(1))
    stage.play()

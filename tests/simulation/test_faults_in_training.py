"""Faults of a cluster file, in training with real gradients."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.jobs import blobs, make_job, result_of, simulated
from polyrhythm.errors import RequestError, RunError
from polyrhythm.events import Event, WorkerJoined, WorkerLost
from polyrhythm.simulation.cluster import cluster_text, parse_cluster
from polyrhythm.simulation.fault_injector import FaultInjector
from polyrhythm.simulation.injection.fault import parse_faults
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import ConstantCluster, job_program, simulate_on
from polyrhythm.simulation.simulated_run import constant_run
from polyrhythm.strategies.role_assignment import roles_in_order
from unit.simulation.clusters import cluster


def _train(spec: str, faults: Any, workers: int = 3) -> list[Event]:
    job = make_job(spec, workers, epochs=4, batch_size=4, dataset=blobs(train=48, test=6))
    where = cluster({"count": 4, "cores": 4}, faults=faults)
    strategy = job.strategy
    events: list[Event] = []
    layout = lay_out(where, workers, strategy.traits(workers).servers, strategy.traits(workers).placement)
    simulate_on(layout, job, events.append)
    return events


def test_a_successor_takes_over_what_is_left_of_training() -> None:
    """4 steps an epoch; worker 1 dies when it has done five, and its successor begins two seconds later."""
    fault = "kill(rank=1, after_step=5, restart_after_s=2)"
    events = _train("parameter_server(placement=dedicated)", fault)
    result = result_of(events)
    lost = [event for event in events if isinstance(event, WorkerLost)]
    joined = [event for event in events if isinstance(event, WorkerJoined)]
    assert [(event.worker, event.rank) for event in lost] == [(1, 1)]
    assert [event.worker for event in joined] == [1]
    assert (result["workers_lost"], result["workers_joined"], result["images_not_seen"]) == (1, 1, 0)
    assert sum(result["staleness"]["histogram"].values()) == 3 * 16  # every step of every worker, once
    assert result["seconds"] == pytest.approx(5 + 2 + 11)
    assert (
        result["parameters_sha256"]
        == result_of(_train("parameter_server(placement=dedicated)", fault))["parameters_sha256"]
    )


def test_training_in_step_ends_with_the_cause() -> None:
    with pytest.raises(RunError, match=r"worker 2 was killed at 3\.5 s, and the run needs it"):
        _train("hybrid", "kill(rank=2, at_s=3.5)")


@pytest.mark.parametrize(
    ("spec", "workers", "faults"),
    [
        ("synchronous", 1, "kill(rank=0, at_s=3.5)"),
        ("ad_psgd", 2, "kill(rank=0, at_s=3.5); kill(rank=1, at_s=3.6)"),  # before it has missed worker 0
    ],
)
def test_a_death_that_nobody_is_left_to_miss_is_named(spec: str, workers: int, faults: str) -> None:
    with pytest.raises(
        RunError,
        match=r"worker 0 was killed at 3\.5 s, and the run needs it: no rank remains that could end it",
    ):
        _train(spec, faults, workers)


def test_faults_of_a_cluster_file_read_back_as_they_are_written() -> None:
    where = cluster(
        {"count": 2}, faults=["kill(rank=1, at_s=2)", "drop(probability=0.5); slow(rank=0, factor=2)"]
    )
    assert [fault.name for fault in where.faults] == ["kill", "drop", "slow"]
    assert parse_cluster(cluster_text(where), "small") == where


def test_an_impossible_fault_of_a_cluster_file_is_one_line() -> None:
    text = cluster_text(cluster({"count": 2})) + "faults: [kill(rank=1)]\n"
    with pytest.raises(RequestError, match="cluster small: faults: fault kill: give one of at_s, after_step"):
        parse_cluster(text, "small")


def test_a_death_of_worker_0_while_servers_are_let_go_is_named() -> None:
    """Its last words are on their way, and end servers that its successor waits for."""
    job = make_job("parameter_server(servers=2)", 2, epochs=1, dataset=blobs(train=16, test=4))
    around = ConstantCluster(latency_s=0.02)
    ended_s = simulated(job, around).events[-1].time_s
    outcomes = []
    for later_s in (
        -0.03,
        0.012,
        0.03,
        0.06,
    ):  # before it asks for the last parameters; on their way; there; at the end
        events: list[Event] = []
        stage = constant_run(roles_in_order(2, 2), job_program(job), events.append, around)
        kill = f"kill(rank=0, at_s={ended_s + later_s:.4f}, restart_after_s=0.001)"
        try:
            FaultInjector(stage, job.strategy, parse_faults(kill)).play()
            outcomes.append(events[-1].outcome)
        except RunError as error:
            outcomes.append(str(error).partition("the run needs it: ")[2].partition(" (")[0])
    assert outcomes == ["done", "the servers were being let go", "rank 0 is gone", "done"]

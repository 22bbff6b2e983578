"""Worker 0 of workers in step is killed in virtual time; its successor musters the others and takes up the lead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.jobs import blobs, make_job, perceptron, result_of, with_batch_norm
from polyrhythm.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    RunEnded,
    RunStarted,
    WorkerJoined,
    WorkerLost,
)
from polyrhythm.roles.archive import Archive
from polyrhythm.roles.job import Job
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import simulate_on
from unit.simulation.clusters import cluster

WORKERS, EPOCHS, LENGTH = 3, 3, 4
"""Of 48 images in batches of four, every worker takes four steps an epoch; a step takes a second."""

STEPS = EPOCHS * LENGTH


def job_of(spec: str, folder: Path | None = None, model: Any = perceptron, **learning: Any) -> Job:
    """Makes a job of three epochs."""
    learning = {"epochs": EPOCHS, "batch_size": 4} | learning
    return make_job(spec, WORKERS, folder=folder, model=model, dataset=blobs(train=48, test=6), **learning)


def events_of(job: Job, *faults: str, latency_s: float = 1e-5) -> list[Event]:
    """Simulates a job while ranks are killed."""
    nic = {"latency_s": latency_s, "bandwidth_bytes_per_s": 1e9}
    where = cluster({"count": 5, "cores": 4}, nic=nic, faults=list(faults))
    strategy, events = job.strategy, []
    layout = lay_out(where, WORKERS, strategy.server_count, strategy.server_placement)
    simulate_on(layout, job, events.append)
    return events


def of(kind: type[Event], events: list[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


@pytest.mark.parametrize("moment", [0.4, 2.5, 3.999, 4.0001, 4.00005, 7.3, 11.2, 11.99, 12.00005, 12.0002])
def test_a_synchronous_run_has_the_bits_of_one_that_lost_nobody(moment: float, tmp_path: Path) -> None:
    undisturbed = events_of(job_of("synchronous", tmp_path / "undisturbed"))
    job = job_of("synchronous", tmp_path / "lost")
    events = events_of(job, f"kill(rank=0, at_s={moment}, restart_after_s=0.7)")
    found, expected = result_of(events), result_of(undisturbed)
    assert (found["workers_lost"], found["workers_joined"]) == (1, 1)
    assert (found["steps"], found["images_not_seen"]) == (STEPS, 0)
    assert found["parameters_sha256"] == expected["parameters_sha256"]
    assert len(of(RunStarted, events)) == len(of(RunEnded, events)) == 1
    tests = [(event.epoch, event.test_loss) for event in of(Evaluated, events)]
    assert tests == [(event.epoch, event.test_loss) for event in of(Evaluated, undisturbed)]
    assert [event.epoch for event in of(CheckpointSaved, events)] == [1, 2, 3]
    assert Archive(job).load().step == STEPS

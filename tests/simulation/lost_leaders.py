"""Runs on a simulated cluster whose worker 0 is killed; a step takes a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conformance.jobs import blobs, make_job, perceptron
from polyrhythm.events import Event
from polyrhythm.roles.job import Job
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import simulate_on
from unit.simulation.clusters import cluster

WORKERS, LENGTH = 3, 4
"""Of 48 images in batches of four, every worker takes four steps an epoch."""


def job_of(
    spec: str, folder: Path | None = None, model: Any = perceptron, *, epochs: int, **learning: Any
) -> Job:
    """Makes a job of so many epochs."""
    learning = {"batch_size": 4} | learning
    images = blobs(train=48, test=6)
    return make_job(spec, WORKERS, folder=folder, model=model, dataset=images, epochs=epochs, **learning)


def events_of(
    job: Job, *faults: str, latency_s: float = 1e-5, heard: list[Event] | None = None
) -> list[Event]:
    """Simulates a job while ranks are killed; what is said before it fails is heard as well."""
    nic = {"latency_s": latency_s, "bandwidth_bytes_per_s": 1e9}
    strategy, events = job.strategy, [] if heard is None else heard
    hosts = (
        {"count": 1, "workers": WORKERS} if strategy.traits(WORKERS).one_host else {"count": 5, "cores": 4}
    )
    where = cluster(hosts, nic=nic, faults=list(faults))
    layout = lay_out(where, WORKERS, strategy.traits(WORKERS).servers, strategy.traits(WORKERS).placement)
    simulate_on(layout, job, events.append)
    return events


def of(kind: type[Event], events: list[Event]) -> list[Any]:
    """Gives the events of a kind."""
    return [event for event in events if isinstance(event, kind)]

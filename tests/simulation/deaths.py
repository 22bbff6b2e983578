"""Runs in virtual time in which ranks are killed, and get successors."""

from __future__ import annotations

from collections.abc import Iterable

from conformance.jobs import uneven
from polyrhythm.events import Event, RunEnded
from polyrhythm.roles.job import Job
from polyrhythm.simulation.run import job_program
from polyrhythm.simulation.simulated_run import ConstantCluster, constant_run
from polyrhythm.strategies.role_assignment import roles_in_order

WORKERS, IMAGES, BATCH_SIZE = 3, 53, 4
LENGTH = 5  # steps of an epoch; 53 images are 4 full steps of 12, and 5 are left for the last one
STEPS = 2 * LENGTH
WHOLE_S = 0.25  # a little more than a run takes
Moment = tuple[float, int]
"""A time in seconds, and a rank."""

AROUND = ConstantCluster(step_s=uneven, latency_s=1e-3)


def events_of(job: Job, kills: Iterable[Moment] = (), successors: Iterable[Moment] = ()) -> list[Event]:
    """Runs a job in which ranks are killed, and others come after them, at given times."""
    events: list[Event] = []
    roles = roles_in_order(job.workers, job.traits.servers)
    stage = constant_run(roles, job_program(job), events.append, AROUND)

    def kill(rank: int) -> None:
        if not stage.tasks[rank].ended:
            stage.cluster.kill(rank)

    def succeed(rank: int) -> None:
        over = any(isinstance(event, RunEnded) for event in events)
        if not over and not stage.cluster.ranks[rank].alive:
            stage.cluster.replace(rank)
            stage.spawn(rank)

    for at_s, rank in kills:
        stage.time.at(at_s, lambda rank=rank: kill(rank))
    for at_s, rank in successors:
        stage.time.at(at_s, lambda rank=rank: succeed(rank))
    stage.play()
    return events

"""Runs a whole job in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.transport import SimulatedCluster
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.events import Event
from polyrhythm.roles.job import Job
from polyrhythm.roles.pace import DrawnPace
from polyrhythm.roles.server import serve
from polyrhythm.roles.worker import work
from polyrhythm.roles.world import StopWish, World
from polyrhythm.strategies.cast import Cast


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """A cluster of constant links and constant compute times.

    Attributes:
        step_s: gives the compute seconds of a step of a worker, from its index.
        latency_s: of every link.
        bandwidth_bytes_per_s: of every link.
        stop_at_s: virtual time at which every rank is asked to stop, or None.
    """

    step_s: Callable[[int], float] = field(default=lambda worker: 0.01)
    latency_s: float = 50e-6
    bandwidth_bytes_per_s: float = 1e9
    stop_at_s: float | None = None


def simulate(job: Job, surroundings: Surroundings | None = None) -> list[Event]:
    """Trains with real gradients in virtual time.

    Args:
        job: what to learn; its run folder, if it has one, must exist.
        surroundings: the cluster.

    Returns:
        The run's events, in order, with virtual seconds.

    Raises:
        Deadlock: no rank can go on.
    """
    around = surroundings or Surroundings()
    time = VirtualTime()
    network = ConstantNetwork(time, around.latency_s, around.bandwidth_bytes_per_s)
    servers = job.strategy.server_count
    cast = Cast(tuple(range(job.workers)), tuple(range(job.workers, job.workers + servers)))
    cluster = SimulatedCluster(time, network, cast.size)
    events: list[Event] = []
    stop = StopWish()
    if around.stop_at_s is not None:
        time.at(around.stop_at_s, stop.wish)
    for rank in range(cast.size):
        pace = DrawnPace(time, lambda rank=rank: around.step_s(rank))  # type: ignore[misc]
        world = World(cluster.communicator(rank), cast, pace, stop, events.append)
        if rank in cast.workers:
            time.spawn(f"worker {rank}", lambda world=world: work(job, world))  # type: ignore[misc]
        else:
            time.spawn(f"server {rank}", lambda world=world: serve(job.strategy, world, job.keeping.resume))  # type: ignore[misc]
    time.run()
    return events

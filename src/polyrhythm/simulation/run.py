"""Runs a whole job in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from polyrhythm.communication.transports.simulated.contended_network import ContendedNetwork
from polyrhythm.communication.transports.simulated.network import ConstantNetwork, Network
from polyrhythm.communication.transports.simulated.transport import SimulatedCluster
from polyrhythm.communication.transports.simulated.virtual_time import Task, VirtualTime
from polyrhythm.events import Event
from polyrhythm.roles.job import Job
from polyrhythm.roles.pace import DrawnPace
from polyrhythm.roles.server import serve
from polyrhythm.roles.worker import work
from polyrhythm.roles.world import StopWish, World
from polyrhythm.simulation.layout import Layout
from polyrhythm.simulation.tempo import check_slowness, step_times
from polyrhythm.simulation.timeline import ObservedNetwork, ObservedTime, Timeline
from polyrhythm.simulation.wiring import Wiring
from polyrhythm.strategies.cast import Cast

Draw = Callable[[], float]


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
    events: list[Event] = []
    stop = StopWish()
    if around.stop_at_s is not None:
        time.at(around.stop_at_s, stop.wish)
    stage = _Stage(time, network, cast, stop, events.append)
    stage.start(job, lambda rank: lambda: around.step_s(rank))
    time.run()
    return events


def simulate_on(
    layout: Layout,
    job: Job,
    emit: Callable[[Event], None],
    *,
    stop: StopWish | None = None,
    timeline: Timeline | None = None,
) -> None:
    """Trains with real gradients in virtual time on a modelled cluster.

    Args:
        layout: the cluster, and which rank is on which of its hosts.
        job: what to learn; its run folder, if it has one, must exist.
        emit: takes the run's events, in order, with virtual seconds.
        stop: whether someone wants the run to stop.
        timeline: notes what every rank does, if it is wanted.

    Raises:
        RequestError: the cluster slows a rank that is no worker.
        Deadlock: no rank can go on.
    """
    check_slowness(layout)
    time = VirtualTime() if timeline is None else ObservedTime(timeline)
    wiring = Wiring(layout)
    network: Network = ContendedNetwork(time, wiring.bandwidths, wiring.route)
    if timeline is not None:
        network = ObservedNetwork(network, time, timeline)
    stage = _Stage(time, network, layout.cast, stop or StopWish(), emit)
    tasks = stage.start(job, lambda rank: step_times(layout, time, job.learning.seed, rank))
    if isinstance(time, ObservedTime):
        time.ranks.update({task: rank for rank, task in tasks.items()})
    time.run()


@dataclass(frozen=True)
class _Stage:
    """Where a simulated run is played."""

    time: VirtualTime
    network: Network
    cast: Cast
    stop: StopWish
    emit: Callable[[Event], None]

    def start(self, job: Job, draws: Callable[[int], Draw]) -> dict[int, Task]:
        """Makes every rank's task, in the order of ranks; gives them by rank."""
        cluster = SimulatedCluster(self.time, self.network, self.cast.size)
        tasks = {}
        for rank in range(self.cast.size):
            name, role = self._role(job, rank, cluster, draws)
            tasks[rank] = self.time.spawn(f"{name} {rank}", role)
        return tasks

    def _role(
        self, job: Job, rank: int, cluster: SimulatedCluster, draws: Callable[[int], Draw]
    ) -> tuple[str, Callable[[], None]]:
        works = rank in self.cast.workers
        draw = draws(rank) if works else _never
        pace = DrawnPace(self.time, draw)
        world = World(cluster.communicator(rank), self.cast, pace, self.stop, self.emit)
        if works:
            return "worker", lambda: work(job, world)
        return "server", lambda: serve(job.strategy, world, job.keeping.resume)


def _never() -> float:
    raise AssertionError("a server computes no steps")

"""The stage of a simulated run: virtual time, links, and a task for every rank."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter

from polyrhythm.communication.message import Message
from polyrhythm.communication.transports.simulated.contended_network import ContendedNetwork
from polyrhythm.communication.transports.simulated.network import ConstantNetwork, Network
from polyrhythm.communication.transports.simulated.transport import SimulatedCluster
from polyrhythm.communication.transports.simulated.virtual_time import Task, VirtualTime
from polyrhythm.events import Event
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.pace import DrawnPace
from polyrhythm.roles.world import LEADER, StopRequest, World
from polyrhythm.simulation.layout import Layout
from polyrhythm.simulation.tempo import check_slowness, step_times
from polyrhythm.simulation.timeline import ObservedNetwork, ObservedTime, Timeline
from polyrhythm.simulation.wiring import Wiring
from polyrhythm.strategies.cast import Cast

Draw = Callable[[], float]

_NEW_OBJECTS_A_COLLECTION = 70_000


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


@dataclass(frozen=True)
class Piece:
    """What is played.

    Attributes:
        role: plays a rank's part in its world.
        nbytes_of: gives the bytes of a message on the links.
        received: gives what arrives of a message.
    """

    role: Callable[[World], None]
    nbytes_of: Callable[[Message], int] = attrgetter("nbytes")
    received: Callable[[Message], Message] = Message.received


@dataclass
class Stage:
    """Where a simulated run is played.

    Attributes:
        time: of all ranks.
        network: their links.
        cast: who does what.
        piece: what is played.
        draws: gives, for a worker's rank, what draws the compute seconds of its steps.
        stop: whether someone wants the run to stop.
        emit: takes the run's events.
        cluster: all ranks.
        tasks: the latest of every rank.
        ledger: of the run so far, where worker 0 gets a successor when it is lost; None: it gets none.
    """

    time: VirtualTime
    network: Network
    cast: Cast
    piece: Piece
    draws: Callable[[int], Draw]
    stop: StopRequest
    emit: Callable[[Event], None]
    cluster: SimulatedCluster = field(init=False)
    tasks: dict[int, Task] = field(init=False, default_factory=dict)
    ledger: Ledger | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.cluster = SimulatedCluster(self.time, self.network, self.cast.size, self.piece.nbytes_of)
        self.cluster.received = self.piece.received

    def play(self) -> None:
        """Plays from the beginning to the end.

        Raises:
            Deadlock: no rank can go on.
        """
        try:
            self.run()
        finally:
            self.time.close()

    def run(self) -> None:
        """Does what `play` does, but where it does not come to its end, ranks stay as they are: close the time then.

        Raises:
            Deadlock: no rank can go on.
        """
        with _collecting_rarely():
            for rank in range(self.cast.size):
                self.spawn(rank)
            self.time.run()

    def spawn(self, rank: int) -> Task:
        """Makes the task of a rank, which starts at the present time; a rank that is gone gets a successor."""
        world = self.world(rank)
        name = f"{'worker' if self.cast.works(rank) else 'server'} {rank}"
        task = self.tasks[rank] = self.time.spawn(
            name, lambda: self.piece.role(world), owner=self.cluster.ranks[rank]
        )
        if isinstance(self.time, ObservedTime):
            self.time.note(task, rank)
        return task

    def world(self, rank: int) -> World:
        """Makes the world that a rank finds itself in."""
        draw = self.draws(rank) if self.cast.works(rank) else _never
        pace = DrawnPace(self.time, draw)
        incarnation = self.cluster.ranks[rank].incarnation
        network = self.cluster.communicator(rank)
        made = World(network, self.cast, pace, self.stop, self.emit, incarnation=incarnation)
        if self.ledger is None:
            return made
        ledger = self.ledger.copy() if rank == LEADER and incarnation else None
        return replace(made, leader_returns=True, ledger=ledger)


def plain_stage(cast: Cast, piece: Piece, emit: Callable[[Event], None], around: Surroundings) -> Stage:
    """Makes the stage of a cluster of constant links.

    Args:
        cast: who does what.
        piece: what is played.
        emit: takes the run's events, in order, with virtual seconds.
        around: the cluster.
    """
    time, stop = VirtualTime(), StopRequest()
    network = ConstantNetwork(time, around.latency_s, around.bandwidth_bytes_per_s)
    if around.stop_at_s is not None:
        time.at(around.stop_at_s, stop.request)
    return Stage(time, network, cast, piece, lambda rank: lambda: around.step_s(rank), stop, emit)


def modelled_stage(
    layout: Layout,
    piece: Piece,
    emit: Callable[[Event], None],
    *,
    seed: int = 0,
    stop: StopRequest | None = None,
    timeline: Timeline | None = None,
) -> Stage:
    """Makes the stage of a modelled cluster.

    Args:
        layout: the cluster, and which rank is on which of its hosts.
        piece: what is played.
        emit: takes the run's events, in order, with virtual seconds.
        seed: of the step times.
        stop: whether someone wants the run to stop.
        timeline: notes what ranks do, if it is wanted.

    Raises:
        RequestError: the cluster slows a rank that is no worker.
    """
    check_slowness(layout)
    time = VirtualTime() if timeline is None else ObservedTime(timeline)
    wiring = Wiring(layout)
    network: Network = ContendedNetwork(time, wiring.bandwidths, wiring.route)
    if timeline is not None:
        network = ObservedNetwork(network, time, timeline)

    def draws(rank: int) -> Draw:
        return step_times(layout, time, seed, rank)

    made = Stage(time, network, layout.cast, piece, draws, stop or StopRequest(), emit)
    made.cluster.host_of = layout.host_of
    return made


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Looks for cycles of garbage a hundredth as often: a run leaves few, and thousands of ranks are much to scan."""
    usual = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS_A_COLLECTION, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _never() -> float:
    raise AssertionError("a server computes no steps")

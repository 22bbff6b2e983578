"""A simulated run: virtual time, links, compute times, and a task for every rank.

The links of a cluster are numbered, and a message takes a way over them:

    host ──out──▶ (rack ──up──▶ ──down──▶ rack) ──in──▶ host        inside a host: one link that all its ranks share,
                                                                    or a tree: up to where two places meet, and down

A server that reads and writes slower than its host's NIC has an additional link of its own in each direction.
The compute time of each worker's steps is drawn, scaled by its host, and longer where the cluster specifies it.
"""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter

from polyrhythm.communication.communicator import Clock
from polyrhythm.communication.message import Message
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.contended_network import ContendedNetwork, Route
from polyrhythm.communication.transports.simulated.network import ConstantNetwork, Network
from polyrhythm.communication.transports.simulated.virtual_time import Task, VirtualTime
from polyrhythm.errors import RequestError
from polyrhythm.events import Event
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.world import LEADER, DrawnPace, Observer, StopRequest, World
from polyrhythm.simulation.cluster import Cluster, Link
from polyrhythm.simulation.layout import Layout
from polyrhythm.simulation.step_time import generator_for_rank
from polyrhythm.simulation.timeline import ObservedNetwork, ObservedTime, Timeline
from polyrhythm.strategies.role_assignment import RoleAssignment


class Wiring:
    """The links between the ranks of a layout.

    Args:
        layout: placement of the ranks.

    Attributes:
        bandwidths: bandwidths of all links, in bytes/s; first every host's sending NIC, then every receiving
            one, then the
            insides of hosts, then every rack's uplink and every rack's downlink, then every server's sending and
            every server's receiving, where the cluster limits them, then those of the trees inside hosts.
    """

    def __init__(self, layout: Layout) -> None:
        cluster = layout.cluster
        self._host_of = layout.host_of
        self._hosts = len(cluster.machines)
        self._racks = cluster.racks
        nics = [machine.nic or cluster.nic for machine in cluster.machines]
        insides = [machine.inside or cluster.inside for machine in cluster.machines]
        self._nic_latency_s = [nic.latency_s for nic in nics]
        self._inside_latency_s = [inside.latency_s for inside in insides]
        speeds = [link.bandwidth_bytes_per_s for link in (*nics, *nics, *insides)]
        uplinks = _uplinks(cluster, nics)
        self._rack_count = len(uplinks)
        self.bandwidths = [*speeds, *uplinks, *uplinks]
        self._sending: dict[int, tuple[int, ...]] = {}
        self._receiving: dict[int, tuple[int, ...]] = {}
        if cluster.server_bandwidth_bytes_per_s is not None:
            self._limit_servers(layout.roles.servers, cluster.server_bandwidth_bytes_per_s)
        self._machines = cluster.machines
        self._up: dict[int, list[int]] = {}
        """By worker: the link upwards of every level of its host's tree, from its place on; the next is downwards."""
        self._plant(layout)

    def _plant(self, layout: Layout) -> None:
        """Number the links of the trees inside hosts."""
        known: dict[tuple[int, int, int], int] = {}
        placed: Counter[int] = Counter()
        for worker in layout.roles.workers:
            host = self._host_of[worker]
            place, placed[host] = placed[host], placed[host] + 1
            found = []
            for level, below in enumerate(self._machines[host].tree):
                key = (host, level, place // below.places)
                if key not in known:
                    known[key] = len(self.bandwidths)
                    self.bandwidths += [below.bandwidth_bytes_per_s] * 2
                found.append(known[key])
            if found:
                self._up[worker] = found

    def _climbed(self, rank: int, levels: int) -> float:
        tree = self._machines[self._host_of[rank]].tree
        return sum(level.latency_s for level in tree[:levels]) if rank in self._up else 0.0

    def _through_tree(self, source: int, to: int) -> Route:
        """Return the way between two ranks of a host that has a tree: up to where they meet, and down again."""
        up, down = self._up.get(source, []), self._up.get(to, [])
        meet = next(
            (level for level, (one, other) in enumerate(zip(up, down, strict=False)) if one == other), None
        )
        climbed, fallen = up[:meet], down[:meet]
        links = (*climbed, *(link + 1 for link in reversed(fallen)))
        if not links:  # below one link of the lowest level
            here = self._host_of[source]
            return Route((2 * self._hosts + here,), self._inside_latency_s[here])
        latency_s = self._climbed(source, len(climbed)) + self._climbed(to, len(fallen))
        return Route(links, latency_s)

    def route(self, source: int, to: int) -> Route:
        """Return the way from one rank to another."""
        here, there = self._host_of[source], self._host_of[to]
        if here == there and (source in self._up or to in self._up):
            return self._through_tree(source, to)
        if here == there:
            return Route((2 * self._hosts + here,), self._inside_latency_s[here])
        latency_s = max(self._nic_latency_s[here], self._nic_latency_s[there])
        out, into = self._up.get(source, ()), self._up.get(to, ())
        latency_s += self._climbed(source, len(out)) + self._climbed(to, len(into))
        own = (*self._sending.get(source, ()), *self._receiving.get(to, ()))
        ends = (*out, here, self._hosts + there, *own, *(link + 1 for link in into))
        if self._racks is None:
            return Route(ends, latency_s)
        up, down = here // self._racks.hosts, there // self._racks.hosts
        if up == down:
            return Route(ends, latency_s)
        first = 3 * self._hosts
        between = (first + up, first + self._rack_count + down)
        return Route((*ends, *between), latency_s + self._racks.latency_s)

    def _limit_servers(self, servers: tuple[int, ...], bandwidth_bytes_per_s: float) -> None:
        first = len(self.bandwidths)
        for number, server in enumerate(servers):
            self._sending[server] = (first + number,)
            self._receiving[server] = (first + len(servers) + number,)
        self.bandwidths += [bandwidth_bytes_per_s] * (2 * len(servers))


def _uplinks(cluster: Cluster, nics: list[Link]) -> list[float]:
    racks = cluster.racks
    if racks is None:
        return []
    starts = range(0, len(nics), racks.hosts)
    if racks.uplink_bandwidth_bytes_per_s is not None:
        return [racks.uplink_bandwidth_bytes_per_s] * len(starts)
    assert racks.oversubscription is not None
    return [
        sum(nic.bandwidth_bytes_per_s for nic in nics[start : start + racks.hosts]) / racks.oversubscription
        for start in starts
    ]


def check_slowness(layout: Layout) -> None:
    """Check that slow ranks exist and compute.

    Raises:
        RequestError: one does not.
    """
    cluster, workers = layout.cluster, layout.roles.workers
    named = [("slow", rank) for rank in cluster.slow]
    passing = cluster.passing_slowness
    named += [("passing_slowness", entry.rank) for entry in passing if entry.rank is not None]
    for entry in passing:
        if entry.host is not None and entry.host >= len(cluster.machines):
            raise RequestError(
                f"cluster {cluster.name}: passing_slowness names host {entry.host}, which does not exist: hosts are "
                f"0 to {len(cluster.machines) - 1}"
            )
    for key, rank in named:
        if rank not in workers:
            what = "is a server" if rank in layout.roles.servers else "does not exist"
            raise RequestError(
                f"cluster {cluster.name}: {key} names rank {rank}, which {what}: workers are 0 to {len(workers) - 1}"
            )


class ServerWork:
    """Processor time of updates on servers and of evaluations, and the remaining time for the workers next to them.

    A worker's next step is slowed by the share of the last step's time in which servers of its host, or an evaluation
    on it, were at work. An evaluation occupies as much of a host as a server.

    Args:
        layout: layout of a cluster with a cost of updates.
        clock: the simulation's.
        nbytes_of: function that returns the bytes of a message on the links.
    """

    def __init__(self, layout: Layout, clock: Clock, nbytes_of: Callable[[Message], int]) -> None:
        self._layout = layout
        self._clock = clock
        self._nbytes_of = nbytes_of
        self._busy_s: defaultdict[int, float] = defaultdict(float)  # by host
        self._evaluated: dict[
            int, tuple[float, float]
        ] = {}  # by host: begin and end of its newest evaluation
        self._looked: dict[
            int, tuple[float, float]
        ] = {}  # by worker: when, and how busy its host had been by then

    def handling(self, server: int) -> Callable[[Message], None] | None:
        """Return a function that lets the time of a server's update pass; None if updates cost nothing."""
        cost = self._layout.cluster.server_update
        if cost is None:
            return None
        host = self._layout.host_of[server]

        def handle(message: Message) -> None:
            seconds = cost.seconds + self._nbytes_of(message) / cost.bandwidth_bytes_per_s
            self._clock.sleep(seconds)
            self._busy_s[host] += seconds

        return handle

    def evaluation_s(self, worker: int) -> float:
        """Return the seconds of an evaluation by a worker."""
        return self._layout.cluster.evaluation_s * self._layout.step_factor(worker)

    def evaluates(self, worker: int, seconds: float) -> None:
        """Note that an evaluation of this length begins now on a worker's host, next to its steps."""
        now = self._clock.now()
        self._evaluated[self._layout.host_of[worker]] = now, now + seconds

    def slowdown(self, worker: int) -> float:
        """Return by how much the step of a worker is longer that begins now."""
        host, now = self._layout.host_of[worker], self._clock.now()
        before_s, busy_s = self._looked.get(worker, (now, 0.0))
        self._looked[worker] = now, self._busy_s[host]
        if now <= before_s:
            return 1.0
        machine = self._layout.cluster.machines[host]
        begin_s, end_s = self._evaluated.get(host, (now, now))
        evaluating_s = max(0.0, min(now, end_s) - max(before_s, begin_s))
        servers = (self._busy_s[host] - busy_s + evaluating_s) / (now - before_s)
        return min(machine.slowed_by(servers), _MOST_SLOWED)


_MOST_SLOWED = 20.0
"""Next to servers that would leave nothing, workers still get a twentieth: the scheduler is fair."""


def step_times(
    layout: Layout, clock: Clock, seed: int, rank: int, work: ServerWork | None = None
) -> Callable[[], float]:
    """Return a function that draws the seconds of a worker's next step, which begins now.

    Args:
        layout: placement of the ranks.
        clock: the simulation's.
        seed: seed of the run.
        rank: the worker's.
        work: work of the servers; None where their updates cost nothing of their own.
    """
    cluster = layout.cluster
    generator = generator_for_rank(seed, rank)
    factor = layout.step_factor(rank) * cluster.slow.get(rank, 1.0)
    host = layout.host_of[rank]
    passing = [entry for entry in cluster.passing_slowness if entry.rank == rank or entry.host == host]
    shared = cluster.shared_slowness
    if factor == 1.0 and not passing and shared is None and work is None:
        return partial(cluster.step_time.draw, generator)

    def draw() -> float:
        seconds = cluster.step_time.draw(generator) * factor
        for entry in passing:
            if entry.from_s <= clock.now() < entry.to_s:
                seconds *= entry.factor
        if shared is not None:
            seconds *= shared.factor(seed, host, clock.now())
        return seconds if work is None else seconds * work.slowdown(rank)

    return draw


Draw = Callable[[], float]

_NEW_OBJECTS_A_COLLECTION = 70_000


@dataclass(frozen=True, kw_only=True)
class ConstantCluster:
    """A cluster of constant links and constant compute times.

    Attributes:
        step_s: returns the compute seconds of a step, from the worker's index.
        latency_s: latency in seconds of every link.
        bandwidth_bytes_per_s: bandwidth in bytes/s of every link.
        stop_at_s: virtual time at which every rank is asked to stop; None: never.
    """

    step_s: Callable[[int], float] = field(default=lambda worker: 0.01)
    latency_s: float = 50e-6
    bandwidth_bytes_per_s: float = 1e9
    stop_at_s: float | None = None


@dataclass(frozen=True)
class RankProgram:
    """Program of the ranks of a simulated run.

    Attributes:
        role: runs one rank, from its context.
        nbytes_of: returns the bytes of a message on the links.
        received: returns what arrives of a message.
    """

    role: Callable[[World], None]
    nbytes_of: Callable[[Message], int] = attrgetter("nbytes")
    received: Callable[[Message], Message] = Message.received


@dataclass
class SimulatedRun:
    """A simulated run.

    Attributes:
        time: time of all ranks.
        network: links of the ranks.
        roles: ranks by role.
        program: program of the ranks.
        draws: returns, for a worker's rank, what draws the compute seconds of its steps.
        stop: whether the run is asked to stop.
        emit: receiver of the run's events.
        cluster: cluster with all ranks.
        tasks: latest task of every rank.
        observer: observer of all ranks; None: nothing observes them.
        ledger: ledger of the run so far, where worker 0 gets a replacement when it is lost; None: it gets none.
        work: cost of updates on servers; None: nothing.
    """

    time: VirtualTime
    network: Network
    roles: RoleAssignment
    program: RankProgram
    draws: Callable[[int], Draw]
    stop: StopRequest
    emit: Callable[[Event], None]
    cluster: SimulatedCluster = field(init=False)
    tasks: dict[int, Task] = field(init=False, default_factory=dict)
    observer: Observer | None = field(init=False, default=None)
    ledger: Ledger | None = field(init=False, default=None)
    work: ServerWork | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.cluster = SimulatedCluster(self.time, self.network, self.roles.size, self.program.nbytes_of)
        self.cluster.received = self.program.received

    def play(self) -> None:
        """Run from the beginning to the end.

        Raises:
            Deadlock: no rank can continue.
        """
        try:
            self.run()
        finally:
            self.time.close()

    def run(self) -> None:
        """Run like `play`, but keep the ranks' states if the run fails; the caller then closes `time`.

        Raises:
            Deadlock: no rank can continue.
        """
        with _collecting_rarely():
            for rank in range(self.roles.size):
                self.spawn(rank)
            self.time.run()

    def spawn(self, rank: int) -> Task:
        """Return the new task of a rank, which starts at the present time; a lost rank gets a replacement."""
        world = self.world(rank)
        name = f"{'worker' if self.roles.works(rank) else 'server'} {rank}"
        task = self.tasks[rank] = self.time.spawn(
            name, lambda: self.program.role(world), owner=self.cluster.ranks[rank]
        )
        if isinstance(self.time, ObservedTime):
            self.time.note(task, rank)
        return task

    def world(self, rank: int) -> World:
        """Return the context of a rank."""
        draw = self.draws(rank) if self.roles.works(rank) else _never
        pace = DrawnPace(self.time, draw)
        if (work := self.work) is not None and self.roles.works(rank):
            pace.evaluation_s = work.evaluation_s(rank)
            pace.evaluates = partial(work.evaluates, rank)
        generation = self.cluster.ranks[rank].generation
        network = self.cluster.communicator(rank)
        made = World(
            network, self.roles, pace, self.stop, self.emit, generation=generation, observer=self.observer
        )
        if self.work is not None and not self.roles.works(rank):
            made = replace(made, handling=self.work.handling(rank))
        if self.ledger is None:
            return made
        ledger = self.ledger.copy() if rank == LEADER and generation else None
        return replace(made, leader_returns=True, ledger=ledger)


def constant_run(
    roles: RoleAssignment, program: RankProgram, emit: Callable[[Event], None], cluster: ConstantCluster
) -> SimulatedRun:
    """Return a run on a cluster of constant links.

    Args:
        roles: ranks by role.
        program: program of the ranks.
        emit: receiver of the run's events, in order, with virtual seconds.
        cluster: the cluster.
    """
    time, stop = VirtualTime(), StopRequest()
    network = ConstantNetwork(time, cluster.latency_s, cluster.bandwidth_bytes_per_s)
    if cluster.stop_at_s is not None:
        time.at(cluster.stop_at_s, stop.request)
    return SimulatedRun(time, network, roles, program, lambda rank: lambda: cluster.step_s(rank), stop, emit)


def modeled_run(
    layout: Layout,
    program: RankProgram,
    emit: Callable[[Event], None],
    *,
    seed: int = 0,
    stop: StopRequest | None = None,
    timeline: Timeline | None = None,
) -> SimulatedRun:
    """Return a run on a modeled cluster.

    Args:
        layout: the cluster, and which rank is on which of its hosts.
        program: program of the ranks.
        emit: receiver of the run's events, in order, with virtual seconds.
        seed: seed of the step times.
        stop: whether the run is asked to stop.
        timeline: records what ranks do; None: nothing is recorded.

    Raises:
        RequestError: the cluster slows a rank that is no worker.
    """
    check_slowness(layout)
    time = VirtualTime() if timeline is None else ObservedTime(timeline)
    wiring = Wiring(layout)
    network: Network = ContendedNetwork(time, wiring.bandwidths, wiring.route)
    if timeline is not None:
        network = ObservedNetwork(network, time, timeline)

    work = None
    if layout.cluster.server_update is not None or layout.cluster.evaluation_s:
        work = ServerWork(layout, time, program.nbytes_of)

    def draws(rank: int) -> Draw:
        return step_times(layout, time, seed, rank, work)

    made = SimulatedRun(time, network, layout.roles, program, draws, stop or StopRequest(), emit)
    made.work = work
    made.cluster.place(layout.host_of)
    return made


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Collect garbage a hundredth as often: a run leaves few cycles, and thousands of ranks take long to scan."""
    usual = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS_A_COLLECTION, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _never() -> float:
    raise AssertionError("a server computes no steps")

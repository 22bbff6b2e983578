"""What is measured and simulated: a strategy on some hosts at some rate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import numpy as np
from links import link_to_next

from namespaces import Host
from polyrhythm.communication.communicator import Communicator
from polyrhythm.config.assemble import strategy_from
from polyrhythm.planning.link import MeasuredLink
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.roles.world import DrawnPace, StopRequest, World
from polyrhythm.simulation.cluster import Cluster, HostKind, Link
from polyrhythm.simulation.layout import Layout, lay_out
from polyrhythm.simulation.run import perform
from polyrhythm.simulation.step_time import generator_for_rank
from polyrhythm.simulation.step_times.normal import Normal
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.training.model_sizes import ModelSizes
from polyrhythm.training.optimizers.sgd import SGD
from ranks import on_hosts
from steady import ENDLESS, Marks, simulated_times, steps_per_s

COMPUTE = Normal(mean=0.05, deviation=0.015)
"""Of a step: what a rank sleeps. Real and simulated ranks draw the same numbers, from the same seed."""

MEASURED_SEEDS, SIMULATED_SEEDS = 2, 8
"""Over so many seeds is the mean taken where workers do not wait for each other: what comes first differs from run to
run, by some percent in the throughput of a few seconds. Lock-step strategies have one seed, the same in both worlds."""

BUCKETS = 2
_FREE = Link(latency_s=0.0, bandwidth_bytes_per_s=1e12)


@dataclass(frozen=True)
class Calibration:
    """All that the simulation is told of the machine: one link between hosts, one inside, one rank alone.

    Attributes:
        between: two hosts.
        inside: a host.
        overhead_s: of a worker alone: seconds of a step on top of those that it sleeps.
    """

    between: MeasuredLink
    inside: MeasuredLink
    overhead_s: float


@dataclass(frozen=True)
class Cell:
    """One entry of the table.

    Attributes:
        strategy: its spec.
        hosts: how many.
        workers_per_host: on each.
        model_bytes: parameters, in float32.
        seconds: that the steps are watched.
        seed: of the compute times.
    """

    strategy: str
    hosts: int
    workers_per_host: int
    model_bytes: int
    seconds: float
    seed: int = 0

    @cached_property
    def dry_run(self) -> DryRun:
        """What all ranks play, with every number of the model."""
        part = self.model_bytes // 4 // BUCKETS
        return DryRun(
            strategy=self._strategy,
            workers=self.hosts * self.workers_per_host,
            sizes=ModelSizes((part,) * BUCKETS, (1 / BUCKETS,) * BUCKETS),
            steps=ENDLESS,
            optimizer=SGD(lr=0.1),
            exact=True,
            seed=self.seed,
        )

    @property
    def _strategy(self) -> Strategy:
        return strategy_from(self.strategy)

    def layout(self, calibration: Calibration | None = None) -> Layout:
        """Places the ranks, on hosts as calibrated or on any."""
        between = inside = _FREE
        step_time = COMPUTE
        if calibration is not None:
            between, inside = (Link(**asdict(link)) for link in (calibration.between, calibration.inside))
            step_time = Normal(mean=COMPUTE.mean + calibration.overhead_s, deviation=COMPUTE.deviation)
        # A sleeping worker leaves all cores to the server beside it.
        host = HostKind(
            name="namespace", count=self.hosts, cores=4, workers=self.workers_per_host, server_takes=0.0
        )
        cluster = Cluster(name="namespaces", hosts=(host,), nic=between, inside=inside, step_time=step_time)
        dry_run = self.dry_run
        strategy = dry_run.strategy
        return lay_out(
            cluster,
            dry_run.workers,
            strategy.traits(dry_run.workers).servers,
            strategy.traits(dry_run.workers).placement,
        )

    def simulated(self, calibration: Calibration) -> float:
        """Return the steps a second of all workers together, in simulation."""
        return statistics.mean(cell._simulated_once(calibration) for cell in self._seeded(SIMULATED_SEEDS))

    def measured(self, hosts: Sequence[Host]) -> float:
        """Return the steps a second of all workers together, on real ranks."""
        return statistics.mean(steps_per_s(cell.times(hosts)) for cell in self._seeded(MEASURED_SEEDS))

    def _seeded(self, seeds: int) -> list[Cell]:
        """Return this cell with several seeds, or by itself where workers go in step."""
        if self._strategy.traits(self.hosts * self.workers_per_host).lockstep:
            return [self]
        return [replace(self, seed=self.seed + number) for number in range(seeds)]

    def _simulated_once(self, calibration: Calibration) -> float:
        dry_run = replace(self.dry_run, exact=False)
        return steps_per_s(simulated_times(self.layout(calibration), dry_run, self.seconds))

    def times(self, hosts: Sequence[Host]) -> list[list[float]]:
        """Plays on real ranks; gives when each worker's steps began, in seconds of the machine's clock."""
        layout = self.layout()
        times = on_hosts(
            [hosts[host] for host in layout.host_of], lambda network: self._play(layout, network)
        )
        return [times[worker] for worker in layout.roles.workers]

    def _play(self, layout: Layout, network: Communicator) -> list[float]:
        """Plays one real rank; gives when its steps began, on the machine's clock."""
        generator = generator_for_rank(self.seed, network.rank)
        marks, stop = Marks(lambda: COMPUTE.draw(generator), time.monotonic), StopRequest()
        if network.rank == 0:
            marks.end_after(self.seconds, stop)
        perform(self.dry_run, World(network, layout.roles, DrawnPace(network.clock, marks), stop))
        return marks.times


def calibrate(hosts: Sequence[Host], model_bytes: int, seconds: float) -> Calibration:
    """Measures one link between hosts, one inside a host, and one worker alone.

    Args:
        hosts: at least two.
        model_bytes: of the largest message, and of the worker's model.
        seconds: for the worker.
    """
    between, inside = (_link(pair, model_bytes) for pair in ((hosts[0], hosts[1]), (hosts[0], hosts[0])))
    alone = Cell("synchronous", 1, 1, model_bytes, seconds)
    taken_s = np.diff(alone.times(hosts)[0])
    generator = generator_for_rank(alone.seed, 0)
    slept_s = [COMPUTE.draw(generator) for _ in taken_s]
    return Calibration(between, inside, max(0.0, float(np.median(taken_s - slept_s))))


def _link(pair: tuple[Host, Host], nbytes: int) -> MeasuredLink:
    measured = on_hosts(pair, lambda network: link_to_next(network, nbytes))[0]
    assert isinstance(measured, MeasuredLink)
    return measured

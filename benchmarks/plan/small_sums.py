"""Times sums of few numbers over hosts with links of 10 Mb/s, next to the simulator's on links as measured.

    python benchmarks/plan/small_sums.py     root, iproute2

Sums that cost few bytes more are sent whole to each other rank, and others in slices (`travels_whole`), in both
worlds. Milliseconds, the median of 25 sums.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "simulator-fidelity"))

from links import link_to_next

from namespaces import shaped_hosts
from polyrhythm.communication.collectives.direct import Direct
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.contended_network import ContendedNetwork, Route
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from ranks import on_hosts

NUMBERS, BITS_PER_S, SUMS, PAUSE_S = (1, 250, 1000, 4810), 10e6, 25, 0.02
LINK_BYTES = 40_000


def timed(network: Communicator) -> list[float]:
    """Return the median seconds of a sum of each size; ranks pause between sums, as for the computing of a step."""
    found = []
    for numbers in NUMBERS:
        vector, seconds = torch.ones(numbers), []
        for _ in range(SUMS):
            time.sleep(PAUSE_S)
            began_s = time.perf_counter()
            network.all_reduce(vector)
            seconds.append(time.perf_counter() - began_s)
        found.append(statistics.median(seconds))
    return found


def simulated_s(count: int, numbers: int, latency_s: float, bandwidth: float, *, sliced: bool) -> float:
    """Return the virtual seconds of a sum, by the simulator's own rule or in slices."""
    clock = VirtualTime()
    network = ContendedNetwork(
        clock, [bandwidth] * (2 * count), lambda one, other: Route((one, count + other), latency_s)
    )
    cluster = SimulatedCluster(clock, network, count)

    def work(rank: int) -> None:
        communicator, vector = cluster.communicator(rank), torch.ones(numbers)
        if sliced:
            Direct().all_reduce(communicator, vector)
        else:
            communicator.all_reduce(vector)

    for rank in range(count):
        clock.spawn(f"{rank}", lambda rank=rank: work(rank))
    clock.run()
    return clock.now()


def main() -> None:
    """Print a line for each number of hosts and each size."""
    for count in (2, 3, 4):
        with shaped_hosts(count, BITS_PER_S) as hosts:
            link = on_hosts(hosts[:2], lambda network: link_to_next(network, LINK_BYTES))[0]
            measured = [max(each) for each in zip(*on_hosts(hosts, timed), strict=True)]
        shape = link.latency_s, link.bandwidth_bytes_per_s
        for numbers, seconds in zip(NUMBERS, measured, strict=True):
            figures = (
                seconds,
                *(simulated_s(count, numbers, *shape, sliced=sliced) for sliced in (False, True)),
            )
            print(
                f"{count} hosts, {4 * numbers} B: measured, simulated, in slices:",
                *(f"{1000 * each:.2f}" for each in figures),
            )


if __name__ == "__main__":
    main()

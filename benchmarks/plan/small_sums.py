"""Times a sum of the parameters of `mlp` over hosts with links of 10 Mb/s, beside the simulator's.

    python benchmarks/plan/small_sums.py     root, iproute2

Sums of few bytes are sent whole to each other rank; the simulator's `direct` cuts sums of any size. Milliseconds, the
median of 25 sums.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from namespaces import shaped_hosts
from polyrhythm.communication.communicator import Communicator
from polyrhythm.cost.all_reduce import direct_s
from polyrhythm.cost.machine import Machine, Payload
from ranks import on_hosts

PARAMETERS, BITS_PER_S, SUMS, PAUSE_S = 4810, 10e6, 25, 0.02


def timed(network: Communicator) -> float:
    """Return the median seconds of a sum; ranks pause between sums, as for the computing of a step."""
    vector, seconds = torch.ones(PARAMETERS), []
    for _ in range(SUMS):
        time.sleep(PAUSE_S)
        began_s = time.perf_counter()
        network.all_reduce(vector)
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def main() -> None:
    """Print a line for each number of hosts."""
    machine = Machine(latency_s=0.0, overhead_s=0.0, seconds_per_byte=8 / BITS_PER_S, header_bytes=0)
    whole_s = 4 * PARAMETERS * machine.seconds_per_byte
    for count in (2, 3, 4):
        with shaped_hosts(count, BITS_PER_S) as hosts:
            measured_s = max(on_hosts(hosts, timed))
        simulated_s = direct_s(machine, count, Payload(PARAMETERS, 4))
        figures = (measured_s, (count - 1) * whole_s, simulated_s)
        print(count, "hosts: measured, sent whole, direct:", *(f"{1000 * each:.1f}" for each in figures))


if __name__ == "__main__":
    main()

"""A measured link is the link: in virtual time, where both are known exactly."""

from __future__ import annotations

import pytest

from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.planning.link import MeasuredLink, answer_link, measure_link

LATENCY_S, BANDWIDTH = 3e-3, 2e8


def test_latency_and_bandwidth_are_those_of_the_link() -> None:
    time = VirtualTime()
    cluster = SimulatedCluster(time, ConstantNetwork(time, LATENCY_S, BANDWIDTH), 2)
    measured: list[MeasuredLink] = []
    time.spawn("measurer", lambda: measured.append(measure_link(cluster.communicator(0), 1, nbytes=1 << 16)))
    time.spawn("answerer", lambda: answer_link(cluster.communicator(1), 0))
    time.run()
    assert measured[0].latency_s == pytest.approx(
        LATENCY_S + 64 / BANDWIDTH
    )  # a header's time counts as latency
    assert measured[0].bandwidth_bytes_per_s == pytest.approx(BANDWIDTH)

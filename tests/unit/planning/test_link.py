"""A measured link is the link: in virtual time, where both are known exactly."""

from __future__ import annotations

import os
import signal
from multiprocessing import popen_fork

import pytest

from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.errors import RunError
from polyrhythm.planning import link
from polyrhythm.planning.link import MeasuredLink, answer_link, measure_inside, measure_link

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


@pytest.mark.parametrize("of_the_one_that_dies", ["measure_link", "answer_link"])
def test_a_rank_that_dies_ends_a_measurement_at_once(
    of_the_one_that_dies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, of_the_one_that_dies, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    poll = popen_fork.Popen.poll

    def poll_late(process: popen_fork.Popen, flag: int = os.WNOHANG) -> int | None:
        # A process that has closed its descriptors may have no status yet.
        return process.returncode if flag == os.WNOHANG else poll(process, flag)

    monkeypatch.setattr(popen_fork.Popen, "poll", poll_late)
    with pytest.raises(RunError, match="died"):
        measure_inside("fork")

"""Sums that are under way when a rank is lost and comes back end, though a loss is news only once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from polyrhythm.communication.all_reduce import AllReduce
from polyrhythm.communication.collectives.flat import Flat
from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.member_collectives import CollectiveBroken
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster, SimulatedCommunicator
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.errors import PeerLost


def test_a_sum_that_waits_for_another_ends_with_the_one_that_waited_for_the_lost() -> None:
    """When rank 1 hands in its part of the second sum, rank 2 is there again, and will never hand in its own."""
    time = VirtualTime()
    cluster = SimulatedCluster(time, ConstantNetwork(time, 0.25, 1e9), 3)
    said: list[str] = []

    def play(rank: int, role: Callable[[SimulatedCommunicator], None]) -> None:
        network = cluster.communicator(rank)
        time.spawn(f"rank {rank}", lambda: role(network), owner=cluster.ranks[rank])

    def add_up(network: SimulatedCommunicator) -> None:
        crew = network.subgroup("crew", range(3))
        sums = AllReduce(Flat(), crew)
        first, second = (sums.start(torch.ones(4)) for _ in range(2))
        with pytest.raises(CollectiveBroken):
            second.wait()
        said.append(f"second at {time.now():g} s")
        with pytest.raises(PeerLost, match="rank 2 is gone"):
            first.wait()
        crew.revoke()

    def hand_in_late(network: SimulatedCommunicator) -> None:
        crew = network.subgroup("crew", range(3))
        sums = AllReduce(Flat(), crew)
        first = sums.start(torch.ones(4))
        time.sleep(4.0)
        for handle in (first, sums.start(torch.ones(4))):
            with pytest.raises(CollectiveBroken):
                handle.wait()

    def succeed() -> None:
        cluster.replace(2)
        play(2, lambda network: network.send(0, Message(Kind.LEAD)))

    for rank, role in enumerate((add_up, hand_in_late, lambda network: time.sleep(9.0))):
        play(rank, role)
    time.at(2.0, lambda: cluster.kill(2))
    time.at(3.0, succeed)
    time.run()
    assert said == ["second at 2.25 s"]

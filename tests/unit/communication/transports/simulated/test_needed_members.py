"""Communicators that need a member end when that one is lost, whoever else lives and is waited for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.member_collectives import CollectiveBroken
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster, SimulatedCommunicator
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.errors import PeerLost

LATENCY_S, BROKEN = 0.25, "another rank has given it up"


class Stage:
    """Three ranks."""

    def __init__(self) -> None:
        self.time = VirtualTime()
        self.cluster = SimulatedCluster(self.time, ConstantNetwork(self.time, LATENCY_S, 1e9), 3)
        self.said: list[str] = []

    def play(self, rank: int, role: Callable[[SimulatedCommunicator], None]) -> None:
        network = self.cluster.communicator(rank)
        self.time.spawn(f"rank {rank}", lambda: role(network), owner=self.cluster.ranks[rank])

    def succeed(self, role: Callable[[SimulatedCommunicator], None]) -> None:
        """Gives rank 0 a successor."""
        self.cluster.replace(0)
        self.play(0, role)


def crew_of(network: SimulatedCommunicator) -> SimulatedCommunicator:
    crew = network.subgroup("crew", range(3))
    crew.revoke_without(0)
    return crew


def idle(network: SimulatedCommunicator) -> None:
    """A rank that does nothing."""


def waiting_for_another(stage: Stage) -> Callable[[SimulatedCommunicator], None]:
    def wait(network: SimulatedCommunicator) -> None:
        crew = crew_of(network)
        with pytest.raises(CollectiveBroken, match=BROKEN):
            crew.receive(1)
        stage.said.append(f"broken at {stage.time.now():g} s")
        with pytest.raises(PeerLost):
            crew.send(0, Message(Kind.VECTOR))

    return wait


def test_who_waits_for_another_hears_of_the_loss() -> None:
    stage = Stage()
    for rank, role in enumerate((idle, idle, waiting_for_another(stage))):
        stage.play(rank, role)
    stage.time.at(2.0, lambda: stage.cluster.kill(0))
    stage.time.run()
    assert stage.said == ["broken at 2.25 s"]


def test_so_it_is_if_the_successor_is_the_first_that_is_ever_heard_under_that_number() -> None:
    stage = Stage()

    def wait(network: SimulatedCommunicator) -> None:
        waiting_for_another(stage)(network)
        with pytest.raises(PeerLost, match="rank 0 is gone"):
            network.receive()
        assert network.receive()[1].version == 1

    for rank, role in enumerate((idle, idle, wait)):
        stage.play(rank, role)
    stage.time.at(2.0, lambda: stage.cluster.kill(0))
    stage.time.at(2.0, lambda: stage.succeed(lambda network: network.send(2, Message(Kind.LEAD, version=1))))
    stage.time.run()
    assert stage.said == ["broken at 2.25 s"]


def test_what_is_meant_for_one_who_was_never_heard_does_not_reach_its_successor() -> None:
    stage = Stage()

    def send(network: SimulatedCommunicator) -> None:
        network.clock.sleep(2.1)  # the successor is there, and nobody has heard of the death
        with pytest.raises(PeerLost, match="rank 0 is gone"):
            network.send(0, Message(Kind.VECTOR))
        stage.said.append("lost")

    for rank, role in enumerate((idle, idle, send)):
        stage.play(rank, role)
    stage.time.at(2.0, lambda: stage.cluster.kill(0))
    stage.time.at(2.0, lambda: stage.succeed(idle))
    stage.time.run()
    assert stage.said == ["lost"]


def test_one_that_needs_who_is_gone_already_ends_at_once() -> None:
    stage = Stage()

    def come_late(network: SimulatedCommunicator) -> None:
        network.clock.sleep(3.0)
        with pytest.raises(CollectiveBroken, match=BROKEN):
            crew_of(network).receive(1)
        stage.said.append("broken")

    for rank, role in enumerate((idle, idle, come_late)):
        stage.play(rank, role)
    stage.time.at(2.0, lambda: stage.cluster.kill(0))
    stage.time.run()
    assert stage.said == ["broken"]


def test_a_communicator_with_the_successor_needs_that_one() -> None:
    stage = Stage()

    def go_on(network: SimulatedCommunicator) -> None:
        with pytest.raises(CollectiveBroken):
            crew_of(network).receive(1)
        network.clock.sleep(0.5)  # as until somebody says who goes on
        anew = network.regrouped("crew anew", range(3), (1, 0, 0))
        anew.revoke_without(0)
        assert anew.receive(0)[1].version == 7
        with pytest.raises(CollectiveBroken):
            anew.receive(1)
        stage.said.append(f"broken at {stage.time.now():g} s")

    def lead(network: SimulatedCommunicator) -> None:
        network.clock.sleep(1.0)
        anew = network.regrouped("crew anew", range(3), (1, 0, 0))
        anew.revoke_without(0)
        anew.send(2, Message(Kind.VECTOR, version=7))

    for rank, role in enumerate((idle, idle, go_on)):
        stage.play(rank, role)
    stage.time.at(2.0, lambda: stage.cluster.kill(0))
    stage.time.at(2.5, lambda: stage.succeed(lead))
    stage.time.at(5.0, lambda: stage.cluster.kill(0))
    stage.time.run()
    assert stage.said == ["broken at 5.25 s"]

"""A rank's line to the leader while the lead changes hands, over a simulated network."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.jobs import strategy
from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.errors import PeerLost
from polyrhythm.roles.control_messages import LEADER_TAG, EnterLeader, MayLeave
from polyrhythm.roles.leader_channel import LeaderChannel
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.role_assignment import RoleAssignment

CAST = RoleAssignment((0, 1), (2,))
WORKER = 1
SERVED = strategy("parameter_server")


class Stage:
    """A worker's channel, and leaders that hear it."""

    def __init__(self, *, returns: bool = True) -> None:
        self.time = VirtualTime()
        self.cluster = SimulatedCluster(self.time, ConstantNetwork(self.time, 1e-3, 1e9), 3)
        self.heard: list[tuple[int, int]] = []
        self._returns = returns

    def lead(self, *words: Message, hears: int = 0) -> None:
        """Lets a leader say something, and hear so many messages; notes who heard which step."""
        generation = self.cluster.ranks[LEADER].generation
        control = self._world(LEADER).control()

        def role() -> None:
            for word in words:
                control.send(WORKER, word)
            for _ in range(hears):
                self.heard.append((generation, control.receive(WORKER)[1].step))

        self.time.spawn(f"leader {generation}", role, owner=self.cluster.ranks[LEADER])

    def work(self, role: Callable[[LeaderChannel], None]) -> None:
        channel = LeaderChannel(self._world(WORKER), SERVED)
        self.time.spawn("worker", lambda: role(channel), owner=self.cluster.ranks[WORKER])

    def _world(self, rank: int) -> World:
        return World(self.cluster.communicator(rank), CAST, leader_returns=self._returns)


def event(number: int) -> Message:
    return Message(Kind.EVENT, step=number)


def lead(generation: int) -> Message:
    return EnterLeader(generation).message()


def test_what_is_said_while_nobody_leads_is_kept_for_the_next_leader() -> None:
    stage = Stage()
    stage.lead(hears=1)

    def work(channel: LeaderChannel) -> None:
        channel.introduction = lambda: [event(100)]
        channel.send(event(1))
        stage.time.sleep(1)  # the leader dies meanwhile
        channel.send(event(2))
        channel.check()
        channel.send(event(3))
        channel.answer(event(4))  # what that leader had asked for
        assert channel.leader_lost
        channel.await_leader()
        channel.send(event(5))
        stage.time.sleep(3)  # another dies, and has a successor already
        channel.send(event(6))
        channel.check()
        channel.check()
        assert not channel.leader_lost
        channel.note_loss(PeerLost(LEADER, "receiving on another communicator, where that is news only now"))
        channel.send(event(7))
        assert channel.control.poll(None, LEADER_TAG) is None

    stage.work(work)
    stage.time.at(0.5, lambda: stage.cluster.kill(LEADER))

    def succeed(hears: int) -> None:
        stage.cluster.replace(LEADER)
        stage.lead(lead(stage.cluster.ranks[LEADER].generation), hears=hears)

    stage.time.at(2.0, lambda: succeed(4))
    stage.time.at(3.0, lambda: stage.cluster.kill(LEADER))
    stage.time.at(4.0, lambda: succeed(3))
    stage.time.run()
    assert stage.heard == [
        (0, 1),
        *((1, step) for step in (100, 2, 3, 5)),
        *((2, step) for step in (100, 6, 7)),
    ]


def test_who_has_said_everything_waits_and_says_it_again_to_another_leader() -> None:
    stage = Stage()
    stage.lead(hears=1)

    def work(channel: LeaderChannel) -> None:
        channel.introduction = lambda: [event(9)]
        channel.send(event(9))
        channel.await_last_word()
        assert stage.time.now() == pytest.approx(2.002, abs=1e-4)

    stage.work(work)
    stage.time.at(0.5, lambda: stage.cluster.kill(LEADER))
    stage.time.at(1.0, lambda: stage.cluster.replace(LEADER))
    stage.time.at(1.0, lambda: stage.lead(lead(1), hears=1))
    stage.time.at(2.001, lambda: stage.lead(MayLeave().message()))
    stage.time.run()
    assert stage.heard == [(0, 9), (1, 9)]


def test_where_the_leader_has_no_successor_its_loss_is_raised_and_nobody_waits_to_leave() -> None:
    stage = Stage(returns=False)
    stage.lead()

    def work(channel: LeaderChannel) -> None:
        assert not channel.survives_leader
        stage.time.sleep(1)
        with pytest.raises(PeerLost):
            channel.send(event(1))
        with pytest.raises(PeerLost):
            channel.answer(event(2))

    stage.work(work)
    stage.time.at(0.5, lambda: stage.cluster.kill(LEADER))
    stage.time.run()

"""What the leader and the others of a loop say to each other, in virtual time: means, losses and late comers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyrhythm.api.loop.leader import LoopLeader
from polyrhythm.api.loop.member import LoopMember
from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.transport import SimulatedCluster
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.config.assemble import strategy_from
from polyrhythm.events import Event, WorkerLost
from polyrhythm.roles.regrouping.formation import Broken, Done
from polyrhythm.roles.welcome import Welcome
from polyrhythm.roles.world import World
from polyrhythm.strategies.cast import Cast
from polyrhythm.strategies.strategy import Strategy

WORKERS = 3


class Regroups:
    """Goes from formation to formation as a `Regroup` does, without anything to train."""

    def __init__(self, side: Any) -> None:
        self.round = 0
        self.side = side

    def mend(self) -> None:
        self.round = self.side.next_formation(
            Broken(round=self.round, done=Done(1, 1), incarnation=0, formation=None)
        ).round


class Hall:
    """A simulated cluster of workers, each with its desk.

    Args:
        spec: of the strategy.
    """

    def __init__(self, spec: str) -> None:
        self.time = VirtualTime()
        self.cluster = SimulatedCluster(self.time, ConstantNetwork(self.time, 1e-3, 1e9), WORKERS)
        self.strategy: Strategy = strategy_from(spec)
        self.events: list[Event] = []
        self.leader = self._leader()

    def world(self, worker: int) -> World:
        return World(self.cluster.communicator(worker), Cast(tuple(range(WORKERS))))

    def _leader(self) -> LoopLeader:
        return LoopLeader(self.world(0), self.strategy, lambda: Welcome({}, 0.0), self.events.append)

    def member(self, worker: int) -> LoopMember:
        return LoopMember(self.world(worker), self.strategy, tells=True)

    def run(self, **acts: Callable[[], object]) -> None:
        for name, act in acts.items():
            self.time.spawn(name, act)
        self.time.run()


def part(value: float) -> torch.Tensor:
    return torch.tensor([value, 1.0], dtype=torch.float64)


def test_a_mean_is_the_same_sum_on_all() -> None:
    hall, found = Hall("ad_psgd"), {}

    def mean(worker: int) -> None:
        desk = hall.leader if worker == 0 else hall.member(worker)
        hall.time.sleep(1.0 - 0.3 * worker)
        found[worker] = [desk.mean(number, part(10.0**worker + number)).tolist() for number in range(2)]

    hall.run(a=lambda: mean(0), b=lambda: mean(1), c=lambda: mean(2))
    assert found == {worker: [[111.0, 3.0], [114.0, 3.0]] for worker in range(3)}


def test_who_waits_for_a_mean_breaks_off_with_those_who_could_not_come_to_it() -> None:
    """Worker 2 must regroup before it comes to the mean, for which worker 1 waits already, and with it the leader."""
    hall, found, rounds = Hall("synchronous"), {}, {}

    def mean(worker: int) -> None:
        desk: Any = hall.leader if worker == 0 else hall.member(worker)
        regroups = Regroups(desk.side)
        desk.wait_with(regroups)
        if worker == 2:
            hall.time.sleep(1.0)
            regroups.mend()
        found[worker] = desk.mean(0, part(worker)).tolist()
        rounds[worker] = regroups.round

    hall.run(a=lambda: mean(0), b=lambda: mean(1), c=lambda: mean(2))
    assert found == {worker: [3.0, 3.0] for worker in range(3)}
    assert rounds == dict.fromkeys(range(3), 1)


@pytest.mark.parametrize("told", [False, True], ids=["unknown", "told"])
def test_nobody_waits_for_the_dead_of_whom_the_leader_knows_what_they_had_taken(told: bool) -> None:
    hall, found = Hall("ad_psgd"), {}

    def dies() -> None:
        desk = hall.member(2)
        if told:
            desk.took(0, 40)
            desk.took(13, 40)  # too soon to be told
            hall.time.sleep(0.6)
            desk.took(17, 40)
        hall.time.sleep(1.0)
        hall.cluster.kill(2)

    hall.run(
        leader=lambda: found.update({0: hall.leader.mean(0, part(1.0)).tolist()}),
        one=lambda: found.update({1: hall.member(1).mean(0, part(5.0)).tolist()}),
        two=dies,
    )
    assert found == {0: [6.0, 2.0], 1: [6.0, 2.0]}
    assert [event.worker for event in hall.events if isinstance(event, WorkerLost)] == [2]
    assert hall.leader.unseen == ([(2, 23, 40)] if told else [])
    assert not hall.leader.is_there(2)


def test_a_mean_that_is_over_is_given_again() -> None:
    hall, found = Hall("ad_psgd"), []

    def one() -> None:
        first = hall.member(1).mean(0, part(2.0))
        hall.time.sleep(1.0)
        found.extend([first.tolist(), hall.member(1).mean(0, part(9.0)).tolist()])
        hall.world(1).control().send(0, Message(Kind.TAKEN))

    def leads() -> None:
        hall.leader.awaited = lambda: (0, 1)
        hall.leader.mean(0, part(3.0))
        hall.time.sleep(2.0)
        hall.leader.heed()

    hall.run(leader=leads, one=one)
    assert found == [[5.0, 2.0], [5.0, 2.0]]

"""What the leader and the others of a loop say to each other, in virtual time: calls, losses, and another leader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyrhythm.api.loop.loop_duties import LoopDuties
from polyrhythm.communication.control_message import StepBroken
from polyrhythm.communication.log import Report
from polyrhythm.communication.message import Kind
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.config.assemble import strategy_from
from polyrhythm.errors import PeerLost
from polyrhythm.events import Event, WorkerLost
from polyrhythm.roles.control_messages import EnterLeader, Introduction, TakenBatches
from polyrhythm.roles.leading.leader import Leader
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.member import Member
from polyrhythm.roles.regroup import Regroup
from polyrhythm.roles.world import World
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.strategy import Strategy

WORKERS = 3


class Regroups(Regroup):
    """Goes from view to view, without anything to train."""

    def __init__(self, control: Any) -> None:
        self.control = control
        self.made = 0

    @property
    def number(self) -> int:
        return self.made

    @property
    def leader(self) -> int:
        return 0

    def reform(self) -> None:
        word = StepBroken(number=self.made, report=Report(steps=1, merged=1, opened=1))
        self.made = self.control.next_view(word).number


class Hall:
    """A simulated cluster of workers, each with its coordinator.

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
        return World(self.cluster.communicator(worker), RoleAssignment(tuple(range(WORKERS))))

    def _leader(self) -> Leader:
        self.duties = LoopDuties(self.world(0), self.strategy, self.events.append)
        return Leader(self.world(0), self.strategy, self.duties, Ledger.of(WORKERS))

    def member(self, worker: int, *, leader_returns: bool = False) -> Member:
        world = replace(self.world(worker), leader_returns=leader_returns)
        return Member(world, self.strategy, awaits_model=True)

    def run(self, **acts: Callable[[], object]) -> None:
        for name, act in acts.items():
            self.time.spawn(name, act)
        self.time.run()


def test_who_waits_for_others_breaks_off_with_those_who_cannot_come() -> None:
    """Worker 2 must regroup while worker 1 waits for it, and the leader too."""
    hall, rounds = Hall("synchronous"), {}

    def wait(worker: int) -> None:
        control: Leader | Member = hall.leader if worker == 0 else hall.member(worker)
        regroups = Regroups(control)
        control.wait_with(regroups)
        if worker == 2:
            hall.time.sleep(1.0)
            regroups.reform()
        while len(rounds) < 3:
            while control.attend():
                regroups.reform()
            if regroups.number:
                rounds[worker] = regroups.number
            hall.time.sleep(0.1)

    hall.run(a=lambda: wait(0), b=lambda: wait(1), c=lambda: wait(2))
    assert rounds == dict.fromkeys(range(3), 1)


@pytest.mark.parametrize("told", [False, True], ids=["unknown", "told"])
def test_the_leader_knows_what_the_dead_had_taken(told: bool) -> None:
    hall = Hall("ad_psgd")

    def dies() -> None:
        control = hall.member(2)
        if told:
            control.report(TakenBatches(0, 40))
            hall.time.sleep(0.6)
            control.report(TakenBatches(17, 40))
        hall.time.sleep(1.0)
        hall.cluster.kill(2)

    def leads() -> None:
        while not hall.events:
            hall.leader.read()
            hall.time.sleep(0.1)

    hall.run(leader=leads, one=lambda: hall.member(1), two=dies)
    assert [event.worker for event in hall.events if isinstance(event, WorkerLost)] == [2]
    assert hall.duties.unseen == ([(2, 23, 40)] if told else [])
    assert not hall.duties.is_there(2)


@pytest.mark.parametrize("returns", [False, True])
def test_who_hears_that_worker_0_is_lost_says_again_to_its_successor_what_it_had_to_say(
    returns: bool,
) -> None:
    hall, heard = Hall("ad_psgd"), []

    def one() -> None:
        control = hall.member(1, leader_returns=returns)
        control.replica = SimpleNamespace(untrained={"count": torch.tensor(3.0)})  # type: ignore[assignment]
        control.begin(0)
        hall.time.sleep(1.0)
        while not heard:
            control.after_step()
            control.report(TakenBatches(0, 40))  # kept while nobody leads
            hall.time.sleep(0.3)

    def dies() -> None:
        hall.time.sleep(0.5)
        hall.cluster.kill(0)

    def successor() -> None:
        hall.time.sleep(2.0)
        hall.cluster.replace(0)
        control = hall.world(0).control()
        control.send(1, EnterLeader(1).message())
        heard.extend(control.receive()[1] for _ in range(3))

    if not returns:
        with pytest.raises(PeerLost):
            hall.run(one=one, dies=dies)
        return
    hall.run(one=one, dies=dies, successor=successor)
    assert [message.kind for message in heard] == [Kind.INTRODUCTION, Kind.TAKEN, Kind.TAKEN]
    assert Introduction.from_message(heard[0]).untrained["count"] == 3.0

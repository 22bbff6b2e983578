"""What the leader and the others of a loop say to each other, in virtual time: calls, losses, and another leader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from polyrhythm.api.loop.loop_duties import LoopDuties
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.config.assemble import strategy_from
from polyrhythm.events import Event, WorkerLost
from polyrhythm.roles.control_messages import TakenBatches
from polyrhythm.roles.leading.leader import Leader
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.member import Member
from polyrhythm.roles.world import World
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.strategy import Strategy

WORKERS = 3


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

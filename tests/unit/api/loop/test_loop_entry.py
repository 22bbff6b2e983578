"""How a successor of worker 0 comes into a loop, and whom it lets in from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from polyrhythm.api.loop.epochs import Begun, EpochProgress, LoopEntry
from polyrhythm.api.loop.loop_duties import LoopDuties
from polyrhythm.api.loop.position import UNKNOWN, Logbook, LoopProgress, Position
from polyrhythm.api.loop.store_board import StoreBoard
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.config.assemble import strategy_from
from polyrhythm.errors import RunError
from polyrhythm.launch.script import WorkerStatus, WorkerStatuses, begun_key
from polyrhythm.roles.leading.leader import Leader
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.world import World
from polyrhythm.strategies.role_assignment import RoleAssignment

WORKERS, STEPS = 3, 6


class Heir:
    """A successor of worker 0 among workers that go in step, who say in the store where they are.

    Args:
        taken: batches of epoch 1.
    """

    def __init__(self, taken: int) -> None:
        store, time = dist.HashStore(), VirtualTime()
        cluster = SimulatedCluster(time, ConstantNetwork(time, 1e-3, 1e9), WORKERS)
        world = World(
            cluster.communicator(0), RoleAssignment(tuple(range(WORKERS))), generation=1, leader_returns=True
        )
        strategy = strategy_from("synchronous")
        self.admitted: list[list[int]] = []
        duties = LoopDuties(world, strategy, lambda event: None)
        duties.admit = self._admit  # type: ignore[method-assign]
        leader = Leader(world, strategy, duties, Ledger.of(WORKERS))
        trainer: Any = SimpleNamespace(regroup=SimpleNamespace(step=STEPS, leader=1))
        self.statuses = WorkerStatuses(store, WORKERS)
        self.statuses.begin()
        board = StoreBoard(store, lambda: None)
        self.loop_progress = LoopProgress()
        optimizer: Any = SimpleNamespace(steps=STEPS, param_groups=[{"lr": 0.1}])
        self.loop_progress.optimizer = optimizer
        self.progress = EpochProgress(self.loop_progress, Logbook(board))
        self.entry = LoopEntry(world, strategy, board, self.statuses, self.progress, leader)
        self.entry.duties = duties
        self.entry.trainer = trainer
        board.post(begun_key(0), Begun(0, 1, 4).to_text())
        others = Logbook(board)
        others.note(Position(0, 1, STEPS, taken, at_end=False, averages=7, rates=(0.05,), kept=()))
        others.formed(1, STEPS)

    def _admit(self, workers: Iterable[int], gone: Callable[[int], bool]) -> bool:
        self.admitted.append(list(workers))
        return False

    def take_part(self) -> Begun:
        begun = self.entry.entered()
        self.entry.begins(begun)
        self.entry.continue_run(begun)
        return begun


def test_it_comes_to_where_the_others_are_with_what_they_have() -> None:
    heir = Heir(taken=2)
    assert heir.take_part() == Begun(0, 1, STEPS)
    assert heir.progress.be_seated() == 2
    assert heir.loop_progress.averages == 7
    assert heir.loop_progress.optimizer is not None
    assert heir.loop_progress.optimizer.param_groups[0]["lr"] == 0.05
    assert heir.statuses.of(0) is WorkerStatus.HERE


@pytest.mark.parametrize(("taken", "first"), [(0, [[2]]), (2, [])], ids=["beginning", "middle"])
def test_it_lets_nobody_into_the_middle_of_an_epoch_but_into_every_later_one(
    taken: int, first: list[list[int]]
) -> None:
    heir = Heir(taken)
    begun = heir.take_part()
    heir.entry.admit_workers(begun, [2])
    assert heir.admitted == first
    heir.entry.admit_workers(Begun(0, 2, 8), [1])
    assert heir.admitted == [*first, [1]]


def test_it_cannot_leave_out_what_no_shard_has_handed_out() -> None:
    with pytest.raises(RunError, match=r"batches that group\.shard has not assigned"):
        Heir(UNKNOWN).take_part()

"""Means by way of the store: the same on all, and nobody waits for the dead."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

from polyrhythm.api.loop.store_board import Means, StoreBoard
from polyrhythm.launch.script import WorkerStatus, WorkerStatuses

WORKERS = 3


class Hall:
    """Workers that meet in one store."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.statuses = WorkerStatuses(self.store, WORKERS)
        self.statuses.begin()
        self.found: dict[int, float] = {}

    def means(self, worker: int, attend: Callable[[], None] = lambda: None) -> Means:
        return Means(worker, StoreBoard(self.store, attend), self.statuses, lambda: range(WORKERS))

    def start(self, worker: int, value: float, weight: float = 1.0) -> threading.Thread:
        """Has a worker come to mean 0 on a thread of its own; returns when it waits there, or has it."""
        waits = threading.Event()

        def come() -> None:
            self.found[worker] = self.means(worker, waits.set).mean(0, value, weight)
            waits.set()

        thread = threading.Thread(target=come)
        thread.start()
        assert waits.wait(60)
        return thread


def test_a_mean_is_the_same_on_all_to_the_bit() -> None:
    hall = Hall()
    first, second = hall.start(0, 0.1, 0.3), hall.start(1, 0.2, 0.7)
    assert hall.found == {}
    third = hall.start(2, 0.7, 1.9)
    for thread in (first, second, third):
        thread.join(60)
    expected = (0.1 * 0.3 + 0.2 * 0.7 + 0.7 * 1.9) / (0.3 + 0.7 + 1.9)
    assert hall.found == dict.fromkeys(range(WORKERS), expected)


def test_nobody_waits_for_who_is_lost_or_behind_and_what_they_bring_late_counts_no_more() -> None:
    for status in (WorkerStatus.GONE, WorkerStatus.COMING, WorkerStatus.WAITING, WorkerStatus.BEHIND):
        hall = Hall()
        thread = hall.start(0, 4.0)
        hall.statuses.set(1, status)
        hall.start(2, 8.0).join(60)
        thread.join(60)
        assert hall.found == {0: 6.0, 2: 6.0}
        assert hall.means(1).mean(0, 100.0, 1.0) == 6.0


def test_who_has_no_share_of_the_epoch_is_not_waited_for() -> None:
    hall = Hall()
    means = Means(1, StoreBoard(hall.store, lambda: None), hall.statuses, lambda: (1,))
    assert means.mean(3, 5.0, 2.0) == 5.0

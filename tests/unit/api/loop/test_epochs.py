"""Whose epochs are whose: marks that whoever comes first leaves, and successors who come to them later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from polyrhythm.api.loop.epochs import Begun, Epochs
from polyrhythm.api.loop.position import LoopProgress
from polyrhythm.api.loop.store_board import StoreBoard
from polyrhythm.launch.script import begun_key


class Scripted:
    """An entry whose answers are given, and which notes what it is told."""

    def __init__(self, present: Sequence[int], begins: Begun | None = None, waits: bool = False) -> None:
        self.rejoins = begins is not None
        self.waits = waits
        self.inside: tuple[int, ...] = ()
        self.now: tuple[list[int], list[int]] = list(present), []
        self.told: list[Any] = []
        self._begins = begins

    def present(self) -> tuple[list[int], list[int]]:
        return self.now

    def admit_workers(self, begun: Begun, entering: Sequence[int]) -> None:
        self.told += [("let in", begun.epoch, *entering)] if entering else []

    def entered(self) -> Begun:
        assert self._begins is not None
        return self._begins

    def continue_run(self, begun: Begun) -> None:
        self.told.append(("go on", begun.epoch))

    def begins(self, begun: Begun) -> None:
        self.begun = begun


class Loop:
    """A worker's loop, as far as epochs see it."""

    def __init__(self, store: Any, worker: int, entry: Scripted) -> None:
        self.loop_progress = LoopProgress()
        self.loop_progress.optimizer = SimpleNamespace(steps=0, param_groups=[{"lr": 0.1}])  # type: ignore[assignment]
        self.entry = entry
        self.board = StoreBoard(store, lambda: None)
        self.epochs = Epochs(worker, self.board, self.loop_progress, entry)

    def through(self, count: int) -> Iterator[int]:
        """Takes four steps and an average an epoch."""
        for epoch in self.epochs.through(count, lambda: None):
            yield epoch
            self.loop_progress.averages += 1
            assert self.loop_progress.optimizer is not None
            self.loop_progress.optimizer.steps += 4


def test_who_comes_first_says_who_has_a_share() -> None:
    store = dist.HashStore()
    first, second = (Loop(store, worker, Scripted([0, 1, 2])) for worker in (0, 1))
    one, other = first.through(2), second.through(2)
    assert next(one) == 0
    second.entry.now = [0, 1], []  # it has heard of a loss meanwhile
    assert next(other) == 0
    assert first.epochs.present == second.epochs.present == (0, 1, 2)
    assert next(other) == 1
    assert next(one) == 1
    assert first.epochs.present == second.epochs.present == (0, 1)
    assert list(one) == list(other) == []
    assert first.epochs.present is None
    assert first.board.read(begun_key(0)) == Begun(0, 1, 4).to_text()


def test_a_successor_begins_with_the_epoch_of_its_predecessor_and_misses_those_without_a_share() -> None:
    store = dist.HashStore()
    leader = Loop(store, 0, Scripted([0, 1]))
    steps = leader.through(5)
    assert [next(steps), next(steps)] == [0, 1]
    leader.entry.now = [0], []
    assert next(steps) == 2
    successor = Loop(store, 1, Scripted([0, 1], begins=Begun(0, 1, 4)))
    own = successor.through(5)
    assert next(own) == 1
    assert (successor.entry.told, successor.loop_progress.averages) == ([("go on", 1)], 1)
    leader.entry.now = [0, 1], []
    assert next(steps) == 3
    assert next(own) == 3
    assert successor.loop_progress.averages == leader.loop_progress.averages == 3
    assert [*steps, *own] == [4, 4]


def test_a_replacement_that_is_admitted_in_the_middle_of_an_epoch_has_a_share_of_it() -> None:
    store = dist.HashStore()
    others = Loop(store, 0, Scripted([0])).through(2)
    assert next(others) == 0
    replacement = Loop(store, 1, Scripted([0, 1], begins=Begun(0, 0, 3), waits=True))
    replacement.entry.inside = (0, 1)
    epochs = replacement.through(2)
    assert next(epochs) == 0
    assert (replacement.epochs.present, replacement.epochs.dealt) == ((0, 1), (0,))


def test_a_successor_hears_that_the_others_have_left_the_loop_early() -> None:
    store = dist.HashStore()
    leader = Loop(store, 0, Scripted([0]))
    for epoch in leader.through(9):
        if epoch == 2:
            break
    successor = Loop(store, 1, Scripted([0, 1], begins=Begun(0, 1, 4)))
    assert list(successor.through(9)) == []
    assert successor.loop_progress.averages == leader.loop_progress.averages == 2


def test_a_loop_that_the_predecessor_was_through_with_is_not_begun_again() -> None:
    store = dist.HashStore()
    leader = Loop(store, 0, Scripted([0, 1]))
    assert list(leader.through(2)) == [0, 1]
    second = leader.through(3)
    leader.entry.now = [0, 1], [1]
    assert next(second) == 0
    assert leader.entry.told == [("let in", 0, 1)]
    successor = Loop(store, 1, Scripted([0, 1], begins=Begun(1, 0, 8), waits=True))
    assert list(successor.through(2)) == []
    assert next(successor.through(3)) == 0
    assert successor.loop_progress.averages == 2

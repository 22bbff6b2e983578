"""Where a successor of worker 0 finds the others: which of their positions are left for it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from polyrhythm.api.loop.position import ALL, Logbook, Position, find_position
from polyrhythm.api.loop.store_board import StoreBoard


def position(steps: int, **given: Any) -> Position:
    facts = {
        "loop": 0,
        "epoch": 2,
        "taken": 2 * steps,
        "at_end": False,
        "averages": 1,
        "rates": (0.1,),
        "kept": (),
    }
    return Position(steps=steps, **facts | given)


class Worker:
    """One whose formation's leader is set by hand."""

    def __init__(self) -> None:
        self.board = StoreBoard(dist.HashStore(), lambda: None)
        self.leader = 0
        self.logbook = Logbook(self.board)

    def found(self, steps: int, epoch: tuple[int, int] = (0, 2)) -> Position | None:
        return find_position(self.board, self.leader, steps, epoch)


def test_a_position_comes_back_as_it_was_left() -> None:
    there = position(3, kept=({"last_epoch": 4, "milestones": [1, 2]},), taken=ALL, at_end=True)
    assert Position.from_text(there.to_text()) == there


def test_of_steps_that_are_noted_the_one_with_which_all_go_on_is_left_for_a_new_leader() -> None:
    for steps in (4, 5):  # the last may be half made, and taken again
        worker = Worker()
        for number in range(6):
            worker.logbook.note(position(number))
        worker.logbook.formed(worker.leader, steps)  # of the leader that there was
        assert worker.found(steps) is None
        worker.leader = 1
        worker.logbook.formed(worker.leader, steps)
        assert worker.found(steps) == position(steps)
        assert worker.found(9 - steps) is None


def test_who_is_between_two_positions_leaves_the_next_one() -> None:
    worker = Worker()
    worker.logbook.note(position(5))
    worker.leader = 1
    worker.logbook.formed(worker.leader, 6)
    assert worker.found(6) is None
    worker.logbook.note(position(6, averages=2))
    assert worker.found(6) == position(6, averages=2)


def test_of_two_positions_the_one_in_the_epoch_that_the_last_leader_had_begun_counts() -> None:
    worker = Worker()
    end, begin = position(6, taken=ALL, at_end=True), position(6, epoch=3, taken=0)
    for each in (position(5), end, begin):
        worker.logbook.note(each)
    worker.leader = 1
    worker.logbook.formed(worker.leader, 6)
    assert worker.found(6, (0, 2)) == end
    assert worker.found(6, (0, 3)) == begin
    assert worker.found(6, (0, 1)) == end

"""Who is there, and how the run ends, by hand."""

from __future__ import annotations

import pytest

from polyrhythm.errors import RunError
from polyrhythm.strategies.parameter_server.serving.membership import PusherRegistry


def test_whoever_asked_for_the_final_parameters_ends_the_run_by_its_second_leave() -> None:
    made = PusherRegistry((0, 1))
    assert made.leave(0)
    made.final = 0
    assert made.ready_to_end is None
    assert made.leave(1)
    assert made.ready_to_end == 0
    assert not made.enter(1)  # too late
    assert not made.leave(0)
    assert made.done


def test_a_loss_is_no_leave_and_its_successor_asks_again() -> None:
    made = PusherRegistry((0, 1))
    made.leave(0)
    made.final = 0
    made.leave(1)
    assert not made.lose(0)  # it had left
    assert (made.final, made.ready_to_end, made.done) == (None, None, False)
    assert made.enter(0)
    assert made.is_there(0)
    assert made.leave(0)
    made.final = 0
    assert made.ready_to_end == 0
    assert not made.leave(0)
    assert made.done


def test_one_who_is_lost_while_it_is_there_is_missed_once() -> None:
    made = PusherRegistry((0, 1))
    made.asking.append(1)
    assert made.lose(1)
    assert not made.lose(1)
    assert (made.there, made.asking, made.done) == (1, [], False)


def test_more_losses_than_can_be_spared_end_the_run_until_a_successor_comes() -> None:
    made = PusherRegistry((0, 1, 2), spares=1, spared_by="backup(spare=1)")
    made.miss(2)
    assert made.lose(2)
    with pytest.raises(
        RunError, match=r"2 workers are lost \(ranks 1, 2\), and backup\(spare=1\) can spare 1"
    ):
        made.miss(1)
    assert made.enter(2)
    made.miss(1)
    made.miss(1)
    assert made.lose(1)


def test_who_was_let_go_counts_until_a_successor_comes() -> None:
    made = PusherRegistry((0, 1))
    made.let_go(1)
    assert made.lose(1)
    assert (made.was_let_go(1), made.was_let_go(0), made.ejected) == (True, False, 1)
    assert made.enter(1)
    assert (made.was_let_go(1), made.ejected) == (False, 1)


def test_whoever_waits_is_named_once() -> None:
    made = PusherRegistry((0, 1))
    made.asking += [1, 0]
    assert made.take_asking() == [1, 0]
    assert made.take_asking() == []

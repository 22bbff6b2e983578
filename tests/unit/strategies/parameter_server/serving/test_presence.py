"""Who is there, and how the run ends, by hand."""

from __future__ import annotations

from polyrhythm.strategies.parameter_server.serving.membership import Presence


def test_whoever_asked_for_the_final_parameters_ends_the_run_by_its_second_leave() -> None:
    made = Presence((0, 1))
    assert made.leave(0)
    made.final = 0
    assert made.ready_to_end is None
    assert made.leave(1)
    assert made.ready_to_end == 0
    assert not made.enter(1)  # too late
    assert not made.leave(0)
    assert made.done


def test_a_loss_is_no_leave_and_its_successor_asks_again() -> None:
    made = Presence((0, 1))
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
    made = Presence((0, 1))
    made.asking.append(1)
    assert made.lose(1)
    assert not made.lose(1)
    assert (made.there, made.asking, made.done) == (1, [], False)

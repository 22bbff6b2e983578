"""Who goes in step next, from what workers say, and what the successor of a leader makes of their words."""

from __future__ import annotations

import pytest

from polyrhythm.communication.control_message import MembershipView, StepBroken
from polyrhythm.communication.log import Report
from polyrhythm.roles.regroup import NoWorkersLeft, PendingMembers


def members(workers=4):
    return PendingMembers(workers)


NOTHING = Report()


def step(done, *, over=False):
    """Gives the report of a worker that meets the others at every step, where no results are kept."""
    return Report(steps=done, merged=done, opened=done, since=done, over=over)


def word(number, report, generation=0, view=None):
    return StepBroken(number=number, report=report, generation=generation, view=view)


def test_at_first_all_go_in_step():
    made = members()
    assert (made.view.number, made.view.workers, made.due) == (0, (0, 1, 2, 3), False)
    assert made.view.absences == ((0, ()),)


def test_it_is_complete_when_all_but_the_leader_wait():
    made = members()
    made.on_message(1, word(0, step(7)))
    assert made.due
    assert not made.complete({0, 1, 3})
    made.on_message(3, word(0, step(8)))
    assert made.complete({0, 1, 3})


def test_the_newest_hands_on_to_those_who_are_behind():
    made = members()
    made.on_message(1, word(0, step(7)))
    made.on_message(3, word(0, step(8)))
    made.enter(2, 1)
    formed = made.form(step(7), {0, 1, 2, 3})
    assert (formed.number, formed.workers, formed.generations) == (1, (0, 1, 2, 3), (0, 0, 1, 0))
    assert (formed.step, formed.gives, formed.over) == (8, ((3, 0), (3, 1), (3, 2)), False)
    assert formed.absences == ((0, ()), (8, ()))
    assert formed.missed == ((8, 2),)
    assert not made.due


def test_who_is_lost_is_left_out_and_words_of_earlier_rounds_count_no_more():
    made = members()
    made.on_message(1, word(0, step(7)))
    made.on_message(2, word(0, step(7)))
    made.lose(2)
    formed = made.form(step(7), {0, 1})
    assert (formed.workers, formed.gives, formed.over) == ((0, 1), (), False)
    assert (formed.absences[-1], formed.missed) == ((7, (2, 3)), ((7, 2), (7, 3)))
    made.on_message(1, word(0, step(7)))
    assert not made.due
    made.on_message(1, word(1, step(7)))
    assert made.due


def test_a_successor_goes_on_from_the_latest_view_that_anybody_took_part_in():
    lost = members()
    lost.on_message(1, word(0, step(3)))
    lost.on_message(2, word(0, step(3)))
    earlier = lost.form(step(3), {0, 1, 2})
    lost.on_message(1, word(1, step(5)))
    lost.enter(3, 1)
    lost.lose(2)
    latest = lost.form(step(5), {0, 1, 3})  # of which only 3 has heard when the leader dies
    made = PendingMembers(4, generation=1)
    made.on_message(3, word(2, NOTHING, 1, latest))
    made.on_message(1, word(1, step(5), 0, earlier))
    formed = made.form(NOTHING, {0, 1, 3})
    assert (formed.number, formed.workers, formed.generations) == (3, (0, 1, 3), (1, 0, 1))
    assert (formed.step, formed.gives) == (5, ((1, 0), (1, 3)))
    assert formed.absences == ((0, ()), (3, (3,)), (5, (2,)), (5, (2,)))
    assert formed.missed == ((3, 3), (5, 2), (5, 0))
    assert (formed.number, formed.leader) != (latest.number, latest.leader)  # the name of a communicator


def test_without_anybody_who_holds_something_there_is_nothing_to_go_on_with():
    made = PendingMembers(2, generation=1)
    made.enter(1, 1)
    with pytest.raises(
        NoWorkersLeft, match=r"^all workers with the parameters have failed, including worker 0$"
    ):
        made.form(NOTHING, {0, 1})


def test_views_and_words_travel_as_text():
    formed = members().form(step(4), {0, 2})
    assert MembershipView.from_message(formed.message().received()) == formed
    told = StepBroken(number=1, report=step(4, over=True), generation=2, view=formed)
    assert StepBroken.from_message(told.message().received()) == told

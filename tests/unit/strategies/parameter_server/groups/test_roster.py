"""Who is in a group: ranks 4, 5 and 6, of which any may be lost and come back."""

from __future__ import annotations

import pytest

from polyrhythm.communication.control_message import StepBroken
from polyrhythm.communication.log import Report
from polyrhythm.communication.message import RefusedMessage
from polyrhythm.strategies.parameter_server.groups.group_server import Roster


def said(
    number: int = 0, steps: int = 0, *, since: int = 0, merged: int = 0, inside: bool = False
) -> StepBroken:
    report = Report(steps=steps, merged=merged, opened=merged + inside, since=since, inside=inside)
    return StepBroken(number=number, report=report)


RETURNS = StepBroken(number=0, report=Report(), generation=1)


def test_those_who_are_left_continue_in_their_order_once_all_have_reported() -> None:
    roster = Roster((4, 5, 6), first=4)
    roster.on_message(6, said())
    roster.lose(4)
    assert not roster.is_complete
    roster.on_message(5, said())
    assert roster.is_complete
    view = roster.form(7)
    assert (view.number, view.workers, view.generations) == (1, (5, 6), (0, 0))
    assert not roster.is_complete


def test_a_replacement_comes_last_and_gets_the_state_of_the_most_advanced() -> None:
    roster = Roster((4, 5, 6), first=4)
    roster.lose(4)
    roster.on_message(4, RETURNS)
    assert not roster.is_complete
    roster.on_message(5, said(steps=3, merged=3))
    roster.on_message(6, said(steps=4, merged=4))
    view = roster.form(3)
    assert (view.workers, view.generations, view.step) == ((5, 6, 4), (0, 0, 1), 4)
    assert view.gives == ((6, 4), (6, 5))


def test_the_first_member_is_called_once_for_those_who_wait_for_admission() -> None:
    roster = Roster((4, 5))
    roster.lose(5)
    roster.on_message(4, said())
    roster.form(1)
    assert roster.to_call() is None
    roster.on_message(5, RETURNS)
    assert roster.to_call() == 4
    assert roster.to_call() is None


def test_reports_of_an_earlier_view_do_not_count() -> None:
    roster = Roster((4, 5))
    roster.lose(5)
    roster.on_message(4, said())
    roster.form(1)
    roster.on_message(4, said())
    assert not roster.is_complete
    assert roster.dismiss() == []


def test_a_replacement_that_dies_before_it_is_admitted_leaves_the_place_lost() -> None:
    roster = Roster((4, 5))
    roster.lose(5)
    roster.on_message(5, RETURNS)
    roster.lose(5)
    roster.on_message(4, said())
    assert roster.form(2).workers == (0,)
    roster.on_message(5, RETURNS)
    with pytest.raises(RefusedMessage, match="rank 4 requested admission, and is present"):
        roster.on_message(4, RETURNS)


def test_a_replacement_that_has_not_got_a_state_yet_asks_for_it_again() -> None:
    roster = Roster((4, 5, 6), first=4)
    roster.lose(4)
    roster.on_message(4, RETURNS)
    for rank in (5, 6):
        roster.on_message(rank, said(steps=2))
    assert roster.form(2).gives == ((5, 4),)
    roster.lose(5)
    roster.on_message(4, StepBroken(number=1, report=Report(), generation=1))
    roster.on_message(6, said(1, steps=2))
    assert roster.form(2).gives == ((6, 4),)


def test_the_first_of_an_empty_group_forms_it_alone() -> None:
    roster = Roster((4, 5))
    roster.lose(4)
    roster.lose(5)
    assert roster.is_empty
    roster.on_message(5, RETURNS)
    assert (roster.is_empty, roster.is_complete) == (False, True)
    view = roster.form(2)
    assert (view.number, view.workers, view.generations, view.gives) == (1, (1,), (1,), ())


def test_steps_that_were_taken_without_a_member_are_known() -> None:
    roster = Roster((4, 5))
    roster.lose(5)
    roster.on_message(4, said())
    roster.form(3)
    assert roster.absent == {4: [], 5: [[3, None]]}
    roster.on_message(5, RETURNS)
    roster.on_message(4, said(1))
    roster.form(8)
    assert roster.absent == {4: [], 5: [[3, 8]]}


@pytest.mark.parametrize(
    ("reports", "missed"),
    [
        ([said(steps=8, since=6, merged=2), said(steps=7, since=6, merged=2)], [[6, 6, 8]]),
        ([said(steps=8, since=9, merged=3, inside=True), said(steps=8, since=6, merged=2)], []),
        ([said(steps=10, since=9, merged=3), said(steps=8, since=6, merged=2)], [[6, 9, 10]]),
    ],
    ids=["two steps of the third round", "one has merged the mean, which has them", "a step of the fourth"],
)
def test_steps_of_a_lost_member_since_the_last_mean_are_missed(
    reports: list[StepBroken], missed: list[list[int]]
) -> None:
    roster = Roster((4, 5, 6), steps=3)
    for rank, report in zip((4, 5), reports, strict=True):
        roster.on_message(rank, report)
    roster.lose(6)
    roster.form(2)
    assert roster.missed == missed


def test_a_newcomer_counts_from_the_next_round_on() -> None:
    roster = Roster((4, 5), steps=4)
    roster.lose(5)
    roster.on_message(4, said(steps=8, since=8))
    roster.form(2)
    assert roster.missed == []
    roster.on_message(5, RETURNS)
    roster.on_message(4, said(1, steps=11, since=8))
    roster.form(2)
    assert roster.missed == [[5, 11, 12]]

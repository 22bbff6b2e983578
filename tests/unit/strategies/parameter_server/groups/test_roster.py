"""Who is in a group: ranks 4, 5 and 6, of which any may be lost and come back."""

from __future__ import annotations

import pytest

from polyrhythm.strategies.parameter_server.groups.group_server import Formation, Roster


def test_those_who_are_left_go_on_in_their_order_once_all_have_broken_off() -> None:
    roster = Roster((4, 5, 6))
    roster.hear(6, 0)
    roster.lose(4)
    assert not roster.is_complete
    roster.hear(5, 0)
    assert roster.is_complete
    assert roster.form(7) == Formation(1, (5, 6), (0, 0))
    assert not roster.is_complete


def test_a_successor_comes_last_so_who_speaks_for_the_group_stays() -> None:
    roster = Roster((4, 5, 6))
    roster.lose(4)
    roster.enter(4, 1)
    assert not roster.is_complete
    for rank in (5, 6):
        roster.hear(rank, 0)
    assert roster.form(3) == Formation(1, (5, 6, 4), (0, 0, 1))


def test_the_speaker_is_called_once_for_those_who_wait_to_be_let_in() -> None:
    roster = Roster((4, 5))
    roster.lose(5)
    roster.hear(4, 0)
    roster.form(1)
    assert roster.to_call() is None
    roster.enter(5, 1)
    assert roster.to_call() == 4
    assert roster.to_call() is None


def test_what_was_said_of_an_earlier_formation_counts_no_more() -> None:
    roster = Roster((4, 5))
    roster.lose(5)
    roster.hear(4, 0)
    roster.form(1)
    roster.hear(4, 0)
    assert not roster.is_complete
    assert roster.dismiss() == []


def test_a_successor_that_dies_before_it_is_let_in_leaves_the_place_lost() -> None:
    roster = Roster((4, 5))
    roster.lose(5)
    roster.enter(5, 1)
    roster.lose(5)
    roster.hear(4, 0)
    assert roster.form(2).ranks == (4,)
    assert roster.may_enter(5)
    assert not roster.may_enter(4)


def test_the_first_of_an_empty_group_forms_it_alone() -> None:
    roster = Roster((4, 5))
    roster.lose(4)
    roster.lose(5)
    assert roster.is_empty
    roster.enter(5, 1)
    assert (roster.is_empty, roster.is_complete) == (False, True)
    assert roster.form(2) == Formation(1, (5,), (1,))


def test_steps_that_were_taken_without_a_member_are_known() -> None:
    roster = Roster((4, 5))
    roster.lose(5)
    roster.hear(4, 0)
    roster.form(3)
    assert roster.absent == {4: [], 5: [[3, None]]}
    roster.enter(5, 1)
    roster.hear(4, 1)
    roster.form(8)
    assert roster.absent == {4: [], 5: [[3, 8]]}


def test_a_formation_reads_back_as_the_same() -> None:
    formation = Formation(2, (5, 4), (0, 3))
    assert Formation.of(formation.message()) == formation


@pytest.mark.parametrize(
    ("has", "words", "missed"),
    [
        (2, [(4, 8, 2), (5, 7, 2)], [[6, 6, 8]]),  # two steps of the third round
        (2, [(4, 9, 3), (5, 9, 2)], []),  # somebody knows the mean, which has them
        (3, [(4, 9, 2), (5, 9, 2)], []),  # who was lost knew it, and servers do
        (3, [(4, 10, 3), (5, 9, 2)], [[6, 9, 10]]),
    ],
)
def test_what_a_lost_member_did_since_the_last_mean_that_anybody_knows_is_missed(
    has: int, words: list[tuple[int, int, int]], missed: list[list[int]]
) -> None:
    roster = Roster((4, 5, 6), steps=3)
    for rank, taken, known in words:
        roster.hear(rank, 0, taken, known)
    roster.lose(6)
    roster.form(has)
    assert roster.missed == missed


def test_a_newcomer_counts_from_the_next_round_on() -> None:
    roster = Roster((4, 5), steps=4)
    roster.lose(5)
    roster.hear(4, 0, 8, 2)
    roster.form(2)
    assert roster.missed == []
    roster.enter(5, 1)
    roster.hear(4, 1, 11, 2)
    roster.form(2)
    assert roster.missed == [[5, 11, 12]]

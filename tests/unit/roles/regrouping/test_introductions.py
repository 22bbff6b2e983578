"""What a new leader hears of who is there, and when it may let newcomers in."""

from __future__ import annotations

import torch

from polyrhythm.roles.control_messages import Introduction
from polyrhythm.roles.leading.leader import Introductions


def word(value: float, *, follows: bool) -> Introduction:
    untrained = {"mean": torch.tensor([value])}
    return Introduction(generation=0, behind=False, record_follows=follows, untrained=untrained)


def test_what_nobody_trains_is_the_first_ones() -> None:
    made = Introductions()
    assert made.untrained is None
    made.on_message(2, word(5, follows=False))
    made.on_message(1, word(6, follows=False))
    assert made.untrained is not None
    assert made.untrained["mean"].tolist() == [5.0]


def test_it_is_complete_when_the_announced_states_have_come_too() -> None:
    made = Introductions()
    assert made.complete({0}, ())
    made.on_message(1, word(0, follows=True))
    made.on_message(2, word(0, follows=False))
    assert not made.complete({0, 1, 2}, ())
    assert made.complete({0, 1, 2}, {1})
    assert not made.complete({0, 1, 2, 3}, {1})
    assert not made.complete({0, 1, 2, 3}, {1, 3}), "a state of before: it has not said that it is there"
    assert made.on_newcomer(3, 3, 1)
    assert made.complete({0, 1, 2, 3}, {1})


def test_newcomers_wait_until_there_is_something_to_welcome_them_with() -> None:
    made = Introductions()
    made.defer()
    assert not made.on_newcomer(1, 1, 1)
    assert not made.on_newcomer(2, 4, 2)
    assert made.none_left({0, 1, 2})
    assert not made.none_left({0, 1, 2, 3})
    made.lose(1)
    assert made.held_back() == [(4, 2)]
    assert made.on_newcomer(1, 1, 2)

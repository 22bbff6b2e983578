"""Who goes in step next, from what workers say."""

from __future__ import annotations

from polyrhythm.roles.formation import Done, Muster, broken_off


def muster(workers=4):
    return Muster(workers)


def step(done):
    """Gives how far a worker has come that meets the others at every step."""
    return Done(meetings=done, steps=done)


def test_at_first_all_go_in_step():
    made = muster()
    assert (made.formation.round, made.formation.workers, made.due) == (0, (0, 1, 2, 3), False)
    assert made.history == [(0, (0, 1, 2, 3))]


def test_it_is_complete_when_all_but_the_leader_wait():
    made = muster()
    made.hear(1, broken_off(0, step(7)))
    assert made.due
    assert not made.complete({0, 1, 3})
    made.hear(3, broken_off(0, step(8)))
    assert made.complete({0, 1, 3})


def test_the_newest_hands_on_to_those_who_are_behind():
    made = muster()
    made.hear(1, broken_off(0, step(7)))
    made.hear(3, broken_off(0, step(8)))
    made.enter(2, 1)
    formed = made.form(step(7), {0, 1, 2, 3}, over=False)
    assert (formed.round, formed.workers, formed.incarnations) == (1, (0, 1, 2, 3), (0, 0, 1, 0))
    assert (formed.step, formed.newest, formed.behind, formed.over) == (8, 3, (0, 1, 2), False)
    assert made.history[-1] == (8, (0, 1, 2, 3))
    assert not made.due


def test_who_is_lost_is_left_out_and_words_of_earlier_rounds_count_no_more():
    made = muster()
    made.hear(1, broken_off(0, step(7)))
    made.hear(2, broken_off(0, step(7)))
    made.lose(2)
    formed = made.form(step(7), {0, 1}, over=True)
    assert (formed.workers, formed.newest, formed.behind, formed.over) == ((0, 1), 0, (), True)
    made.hear(1, broken_off(0, step(7)))
    assert not made.due
    made.hear(1, broken_off(1, step(7)))
    assert made.due


def test_who_has_met_the_others_as_often_is_not_behind_however_many_steps_it_has_done():
    made = muster()
    made.hear(1, broken_off(0, Done(meetings=2, steps=11)))
    made.hear(2, broken_off(0, Done(meetings=1, steps=7)))
    made.hear(3, broken_off(0, Done(meetings=2, steps=8)))
    formed = made.form(Done(meetings=2, steps=9), {0, 1, 2, 3}, over=False)
    assert (formed.step, formed.newest, formed.behind) == (11, 1, (2,))

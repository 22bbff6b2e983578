"""Steps by hand-made events: what is in turn passes, and what is left out or taken twice is named."""

from __future__ import annotations

import pytest
import torch

from polyrhythm.verification.general import EveryStep
from polyrhythm.verification.invariant import Ended, Stepped, Violation


def step(number: int, *, rank: int = 1, generation: int = 0, members: tuple[int, ...] = ()) -> Stepped:
    regrouped = dict.fromkeys(members, 0) if members else None
    return Stepped(1.0, rank, number, torch.zeros(2), regrouped, generation)


def watching(*numbers: int, **options: bool) -> EveryStep:
    """Gives one that has seen worker 1 take these steps."""
    watching = EveryStep((0, 1), **options)
    for number in numbers:
        watching.stepped(step(number))
    return watching


@pytest.mark.parametrize(
    ("number", "complaint"),
    [(1, "expected step 2, found step 1"), (3, "expected step 2, found step 3")],
)
def test_steps_come_one_after_the_other(number: int, complaint: str) -> None:
    with pytest.raises(Violation, match=complaint):
        watching(0, 1).stepped(step(number))


def test_a_successor_may_repeat_but_misses_one_step_for_each_that_was_lost() -> None:
    watching(0, 1).stepped(step(0, generation=1))
    watching(0, 1).stepped(step(3, generation=1))
    watching(0, 1).stepped(step(4, generation=2))
    with pytest.raises(Violation, match="expected step 0 to 3, found step 4"):
        watching(0, 1).stepped(step(4, generation=1))
    later = watching(0, 1)
    later.stepped(step(2, generation=1))
    with pytest.raises(Violation, match="expected step 3, found step 2"):
        later.stepped(step(2, generation=1))


def test_who_is_late_may_leave_steps_out_and_never_goes_back() -> None:
    free = watching(0, 5, leaves_out=True)
    with pytest.raises(Violation, match="expected step 6, found step 5"):
        free.stepped(step(5))
    free.ended(Ended(2.0, 9, (1,)))


def test_at_the_end_all_steps_of_who_is_there_are_done() -> None:
    done = watching(0, 1)
    done.ended(Ended(2.0, 2, (1,)))  # nobody asks for those of a worker that was lost
    done.ended(Ended(2.0, 3, (1,), {1: 1}))
    with pytest.raises(Violation, match="rank 1: steps at the end: expected 3, found 2"):
        done.ended(Ended(2.0, 3, (1,)))


def test_where_workers_regroup_somebody_took_the_last_step() -> None:
    regrouping = watching(0, 1, regroups=True)
    regrouping.stepped(step(3, members=(0, 1)))
    regrouping.ended(Ended(2.0, 4, (0, 1)))  # rank 0 was handed all of it
    with pytest.raises(Violation, match="steps at the end: expected 5, found 4"):
        regrouping.ended(Ended(2.0, 5, (0, 1)))

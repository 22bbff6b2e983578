"""What watches batches sees a portion that is missing, applied twice or stale, and a worker that was not waited for."""

from collections import Counter

import pytest
import torch

from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.verification.invariant import Handled, Violation
from polyrhythm.verification.servers import Batches

FIRST, SECOND, SERVER = 0, 1, 2


def event(source, message, replies=(), *, before=0, updates=0, applied=None):
    return Handled(
        0.5, SERVER, source, message, list(replies), before, before + updates, Counter(applied or {})
    )


def push(step, weight=1.0):
    return Message(Kind.PUSH, torch.ones(2), step=step, weight=weight)


def answers(step, ranks=(FIRST, SECOND)):
    return [(rank, Message(Kind.PARAMETERS, torch.ones(2), step=step)) for rank in ranks]


def watch():
    made = Batches(RoleAssignment((FIRST, SECOND), (SERVER,)))
    made.handled(event(FIRST, push(2)))
    return made


def test_batches_that_are_whole_pass():
    made = watch()
    made.handled(event(SECOND, push(2), answers(3), updates=1, applied={0: 6}))
    made.handled(event(FIRST, push(2), answers(3, [FIRST]), before=1))  # it repeats itself, and is answered
    made.handled(event(FIRST, push(4), before=1))
    made.handled(event(SECOND, push(4, 0.0), answers(5), before=1, updates=1, applied={0: 2}))
    for rank in (FIRST, SECOND):  # two empty ones
        replies = answers(6) if rank == SECOND else ()
        made.handled(event(rank, push(5, 0.0), replies, before=2))
    made.handled(event(SECOND, Message(Kind.LEAVE), before=2))
    made.handled(event(FIRST, push(6), answers(7, [FIRST]), before=2, updates=1, applied={0: 1}))
    with pytest.raises(
        Violation, match="expected 1 fresh portions, of ranks"
    ):  # all of it is counted: no old ones
        made.handled(event(FIRST, push(7), answers(8, [FIRST]), before=3, updates=1, applied={0: 2}))


@pytest.mark.parametrize(
    ("replies", "updates", "applied"),
    [
        (answers(3), 1, {0: 5}),
        (answers(3), 1, {0: 7}),
        (answers(3), 1, {0: 5, 1: 1}),
        (answers(3), 2, {0: 6}),
        (answers(3), 0, {}),
        (answers(3, [FIRST]), 1, {0: 6}),
        ([], 1, {0: 6}),
    ],
)
def test_others_do_not(replies, updates, applied):
    with pytest.raises(Violation, match="a batch that is over: expected 6 fresh portions, of ranks"):
        watch().handled(event(SECOND, push(2), replies, updates=updates, applied=applied))


def test_who_is_not_waited_for_is_seen():
    made = Batches(RoleAssignment((FIRST, SECOND), (SERVER,)))
    with pytest.raises(Violation, match=r"of ranks \[0, 1\], found 1 updates of \{0: 3\}, ranks \[0\]"):
        made.handled(event(FIRST, push(2), answers(3, [FIRST]), updates=1, applied={0: 3}))

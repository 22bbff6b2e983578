"""How many gradients an update takes, by hand-made events."""

from __future__ import annotations

from collections import Counter

import pytest

from polyrhythm.communication.message import Kind, Message
from polyrhythm.verification.invariant import Handled, Violation
from polyrhythm.verification.servers import Gathered


def update(found: int, message: Message | None, staleness: int = 0) -> Handled:
    return Handled(1.0, 4, 1, message, [], 5, 6, Counter({staleness: found}))


PUSH, LEAVE = Message(Kind.PUSH), Message(Kind.LEAVE)


def test_an_update_takes_as_many_as_declared() -> None:
    gathered = Gathered(3)
    gathered.handled(update(3, PUSH))
    for found in (2, 4):
        with pytest.raises(Violation, match=f"gradients of an update: expected 3, found {found}"):
            gathered.handled(update(found, PUSH))
    with pytest.raises(Violation, match="expected 3, found 2"):
        gathered.handled(update(2, LEAVE))


@pytest.mark.parametrize("parting", [LEAVE, None])
def test_what_is_left_over_is_taken_when_somebody_leaves(parting: Message | None) -> None:
    gathered = Gathered(3, leftover=True)
    gathered.handled(update(2, parting))
    gathered.handled(update(1, parting))
    for found, message in ((2, PUSH), (4, parting)):
        with pytest.raises(Violation, match=f"expected 3, found {found}"):
            gathered.handled(update(found, message))


def test_where_late_gradients_are_dropped_none_is_stale() -> None:
    with pytest.raises(Violation, match=r"expected \{0: 3\}, found \{1: 3\}"):
        Gathered(3, drops=True).handled(update(3, PUSH, staleness=1))

"""When successors start, by hand."""

from __future__ import annotations

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.launch.supervisor import Succession


def test_pauses_have_a_limit() -> None:
    made = Succession(20)
    pauses = [made.lose(Peer(1, generation), 0.0) for generation in range(9)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_successor_that_lived_long_is_replaced_soon() -> None:
    made = Succession(20)
    assert made.lose(Peer(1, 0), 0.0) == 0.5  # and it starts at 0.5
    assert made.lose(Peer(1, 1), 2.49) == 1.0  # after less than 2 s; the next one starts at 3.49
    assert made.lose(Peer(1, 2), 7.5) == 0.5  # after 4 s


def test_one_whom_all_wait_for_starts_at_once_unless_the_last_one_died_soon() -> None:
    made = Succession(9)
    assert made.lose(Peer(0, 0), 10.0, awaited=True) == 0.0
    assert made.lose(Peer(0, 1), 12.5, awaited=True) == 0.0
    assert made.lose(Peer(0, 2), 13.0, awaited=True) == 0.5  # after half a second
    assert made.lose(Peer(0, 3), 14.0, awaited=True) == 1.0
    assert made.lose(Peer(0, 4), 40.0, awaited=True) == 0.0

"""Which ranks are vacant, and for which incarnation."""

from __future__ import annotations

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.launch.joining.join_server import Places


def test_the_lowest_vacant_rank_is_given_to_the_next_incarnation() -> None:
    places = Places()
    assert places.take() is None
    places.vacate(Peer(3, 0))
    places.vacate(Peer(1, 2))
    assert [places.take(), places.take(), places.take()] == [Peer(1, 3), Peer(3, 1), None]


def test_a_place_that_was_left_is_vacant_again() -> None:
    places = Places()
    places.vacate(Peer(1, 0))
    taken = places.take()
    assert taken is not None
    places.vacate(taken)
    assert places.take() == Peer(1, 2)


def test_late_news_of_a_predecessor_vacates_nothing() -> None:
    places = Places()
    places.vacate(Peer(1, 0))
    assert places.take() == Peer(1, 1)
    places.vacate(Peer(1, 0))
    assert places.take() is None


def test_a_certain_rank_is_given_only_if_it_is_vacant() -> None:
    places = Places()
    places.vacate(Peer(1, 0))
    places.vacate(Peer(3, 0))
    assert places.take(2) is None
    assert [places.take(3), places.take(3), places.take()] == [Peer(3, 1), None, Peer(1, 1)]

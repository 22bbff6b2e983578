from __future__ import annotations

from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.inbox import Inbox, Want

MEMBERS = (0, 1, 2)


def _want(source: int | None = None, tag: int = 0, context: int = 7) -> Want:
    return Want(context, source, tag, MEMBERS)


def _filled(*arrivals: tuple[int, int, int, int]) -> Inbox:
    """Makes an inbox of messages given as (context, source, tag, version), in the order of their arrival."""
    inbox = Inbox()
    for context, source, tag, version in arrivals:
        inbox.put(context, source, Message(Kind.PUSH, version=version, tag=tag))
    return inbox


def _versions(inbox: Inbox, want: Want) -> list[tuple[int, int]]:
    found = []
    while (entry := inbox.take(want)) is not None:
        found.append((entry[0], entry[1].version))
    return found


def test_a_loss_is_told_to_anyones_receiver_once_a_context() -> None:
    inbox = Inbox()
    inbox.lose(2)
    assert inbox.is_lost(2)
    assert not inbox.is_lost(1)
    assert inbox.unreported_loss(_want()) == 2
    assert inbox.unreported_loss(_want()) is None
    assert inbox.unreported_loss(_want(tag=3)) is None
    assert inbox.unreported_loss(_want(context=8)) == 2
    inbox.lose(2)  # the same loss, seen on another link
    assert inbox.unreported_loss(_want()) is None
    inbox.lose(1)
    assert inbox.unreported_loss(_want()) == 1


def test_a_loss_is_always_told_to_who_waits_for_the_lost() -> None:
    inbox = Inbox()
    inbox.lose(2)
    for _ in range(3):
        assert inbox.unreported_loss(_want(source=2)) == 2
    assert inbox.unreported_loss(_want(source=1)) is None
    assert inbox.unreported_loss(_want()) == 2


def test_a_successor_is_heard_after_the_loss_and_without_what_its_predecessor_left() -> None:
    inbox = _filled((7, 2, 0, 1), (7, 1, 0, 2), (8, 2, 5, 3))
    inbox.lose(2)
    inbox.regain(2)
    assert not inbox.is_lost(2)
    inbox.put(7, 2, Message(Kind.PULL, version=4))
    inbox.put(7, 1, Message(Kind.PUSH, version=5))
    assert _versions(inbox, _want()) == [(1, 2), (1, 5)]
    assert inbox.unreported_loss(_want()) == 2
    assert inbox.unreported_loss(_want()) is None
    assert _versions(inbox, _want()) == [(2, 4)]
    assert _versions(inbox, _want(source=2, tag=5, context=8)) == []


def test_nothing_is_sent_to_a_successor_in_the_belief_that_it_is_the_first() -> None:
    inbox = Inbox()
    assert not inbox.is_lost_to(7, 2)
    inbox.lose(2)
    assert inbox.unreported_loss(_want()) == 2
    assert inbox.is_lost_to(7, 2)
    inbox.regain(2)
    assert not inbox.is_lost_to(7, 2)
    assert inbox.is_lost_to(8, 2)
    inbox.unreported_loss(_want(source=2, context=8))
    assert not inbox.is_lost_to(8, 2)


def test_every_loss_of_a_rank_is_told() -> None:
    inbox = Inbox()
    for _ in range(3):
        inbox.lose(2)
        assert inbox.unreported_loss(_want()) == 2
        inbox.regain(2)
        assert inbox.unreported_loss(_want()) is None
    inbox.lose(2)
    inbox.regain(2)
    inbox.lose(2)  # twice, and nobody looked meanwhile
    assert inbox.unreported_loss(_want()) == 2
    assert inbox.unreported_loss(_want()) is None


def test_on_a_communicator_of_those_who_are_there_earlier_losses_are_no_news():
    inbox = Inbox()
    inbox.regain(2, 1)  # its predecessor's loss was heard by nobody here
    old, new = Want(1, 2, 0, (0, 1, 2)), Want(5, 2, 0, (0, 1, 2))
    inbox.know_losses(5, {0: 0, 1: 0, 2: 1})
    assert inbox.unreported_loss(new) is None
    assert not inbox.is_lost_to(5, 2)
    assert inbox.unreported_loss(old) == 2
    inbox.lose(2, 1)
    inbox.regain(2, 2)  # the one that the communicator was made of is gone, though another has come
    assert inbox.unreported_loss(new) == 2

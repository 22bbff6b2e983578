from __future__ import annotations

import pytest
import torch

from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.tcp.outgoing_link import MOST_COPIED_BYTES, Outbox, SendHandle
from polyrhythm.errors import PeerLost


def handle(elements: int = 1) -> SendHandle:
    return SendHandle(Message(Kind.PUSH, torch.ones(elements)), 0, 5)


def filled(count: int, elements: int = 1) -> tuple[Outbox, list[SendHandle]]:
    outbox, handles = Outbox(), [handle(elements) for _ in range(count)]
    for each in handles:
        outbox.put(each)
    return outbox, handles


def test_messages_are_written_in_order_and_again_behind_what_arrived() -> None:
    outbox, handles = filled(4)
    for number in range(3):
        assert outbox.next() == (number, handles[number])
        outbox.wrote(number)
    assert outbox.arrive(1)
    outbox.started = 17
    outbox.rewind()
    assert (outbox.next(), outbox.started) == ((1, handles[1]), 0)
    for number in range(1, 4):
        outbox.wrote(number)
    assert not outbox.waits


def test_a_short_message_has_left_when_it_is_written_and_a_long_one_when_it_arrived() -> None:
    for elements, left in ((1, True), (MOST_COPIED_BYTES, False)):
        outbox, (only,) = filled(1, elements)
        assert not only.done()
        outbox.wrote(0)
        assert only.done() is left
        outbox.arrive(1)
        assert only.done()
        only.wait(0.0)


def test_word_of_an_arrival_may_be_sooner_than_that_of_the_writing() -> None:
    outbox, handles = filled(2)
    assert outbox.arrive(1)
    outbox.wrote(0)
    assert outbox.next() == (1, handles[1])


@pytest.mark.parametrize("count", [0, 3, 2**63])
def test_a_receiver_cannot_have_less_than_before_or_more_than_was_sent(count: int) -> None:
    outbox, _ = filled(2)
    assert outbox.arrive(1)
    assert not outbox.arrive(count)
    assert outbox.arrive(2)


def test_what_has_not_left_when_a_link_ends_is_lost() -> None:
    outbox, (first, second) = filled(2)
    outbox.wrote(0)
    outbox.end()
    first.wait(0.0)  # it had left
    with pytest.raises(PeerLost, match="rank 5 is gone"):
        second.wait(0.0)
    assert second.done()

from __future__ import annotations

import pytest

from polyrhythm.communication.message import HEADER_BYTES, MalformedMessage, Reason
from polyrhythm.communication.transports.inbox import MOST_EARLY, EarlyMessages

MOST_BYTES = 1000


def count(early: EarlyMessages, payload_bytes: int, context: int = 7, sender: int = 3) -> None:
    early.count(context, sender, HEADER_BYTES + payload_bytes, MOST_BYTES)


def refused(early: EarlyMessages, payload_bytes: int, context: int = 7, sender: int = 3) -> bool:
    with pytest.raises(MalformedMessage) as caught:
        count(early, payload_bytes, context, sender)
    return caught.value.reason is Reason.EARLY


def test_as_many_bytes_may_wait_as_one_message_may_have() -> None:
    early = EarlyMessages()
    count(early, 400)
    count(early, 600, context=8)
    assert refused(early, 1)
    assert refused(early, 1, context=9)
    count(early, 0, context=9)  # and headers
    count(early, 1000, sender=4)  # another's are another's


def test_so_many_messages_may_wait_and_no_more() -> None:
    early = EarlyMessages()
    for number in range(MOST_EARLY):
        count(early, 0, context=number)
    assert refused(early, 0)
    count(early, 0, sender=4)


def test_what_is_refused_counts_for_nothing() -> None:
    early = EarlyMessages()
    count(early, 400)
    assert refused(early, 601)
    count(early, 600)


def test_what_is_for_a_communicator_that_is_made_or_given_up_waits_no_more() -> None:
    early = EarlyMessages()
    count(early, 600)
    count(early, 400, context=8)
    early.make(7)
    assert [early.is_early(context) for context in (7, 8)] == [False, True]
    count(early, 10_000)  # as much as one likes, now
    count(early, 600, context=9)
    assert refused(early, 1, context=8)
    early.drop(8)
    count(early, 400, context=8)
    assert refused(early, 1, context=8)


def test_a_successor_begins_with_nothing() -> None:
    early = EarlyMessages()
    count(early, 1000)
    count(early, 1000, sender=4)
    early.forget(3)
    count(early, 1000)
    assert refused(early, 1)
    assert refused(early, 1, sender=4)

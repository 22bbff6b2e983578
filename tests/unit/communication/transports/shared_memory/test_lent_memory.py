"""Memory that is lent over links: read where it lies, given back, and no longer counted on once its reader is gone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from polyrhythm.communication.message import Kind, MalformedMessage, Message
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.shared_memory import lent_memory
from polyrhythm.communication.transports.shared_memory.lent_memory import LentSegments, Segment, shared_file
from polyrhythm.communication.transports.shared_memory.links import (
    MOST_SLOTS,
    BorrowedSlots,
    IncomingMemoryLinks,
    LendingSlots,
    OutgoingMemoryLink,
    place_in,
)
from unit.communication.transports.heard import PATIENCE_S, Heard

SENDER, RECEIVER = Peer(3, 1), Peer(4, 0)
SIZE = 50_000


class Lender:
    """A sender that lends, and its receiver."""

    def __init__(self) -> None:
        self.heard = Heard()
        self.incoming = IncomingMemoryLinks("here", self.heard)
        self.memory = LentSegments()
        self.link = OutgoingMemoryLink(self.incoming.card, SENDER, RECEIVER, self.heard, self.memory)

    def vector(self, size: int = SIZE) -> torch.Tensor:
        return self.memory.vector(torch.empty(size)).copy_(torch.arange(float(size)))

    def sent(self, tensor: torch.Tensor) -> torch.Tensor:
        self.link.start_send(Message(Kind.PARAMETERS, tensor), 0).wait()
        found = self.heard.next().tensor
        assert found is not None
        return found


@pytest.fixture
def lender() -> Iterator[Lender]:
    made = Lender()
    yield made
    made.link.close(PATIENCE_S)
    made.incoming.close(PATIENCE_S)
    made.memory.close()


def soon(holds: Callable[[], bool]) -> bool:
    """Return whether something holds before long: a reader drops a message just after it has handed it on."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-3)
    return True


def test_what_is_lent_is_no_copy_and_comes_back(lender: Lender) -> None:
    vector = lender.vector()
    for number in range(3):
        seen = lender.sent(vector)
        assert torch.equal(seen, torch.cat([torch.full((number,), -1.0), torch.arange(float(SIZE))[number:]]))
        assert lender.memory.lends(vector)
        vector[number] = -1.0
        assert seen[number] == -1.0
        del seen
        assert soon(lambda: not lender.memory.lends(vector))


def test_parts_are_where_they_lie_and_all_must_come_back(lender: Lender) -> None:
    vector = lender.vector()
    parts = [lender.sent(vector[start : start + 10_000]) for start in (40_000, 7, 20_001)]
    assert [part[0].item() for part in parts] == [40_000.0, 7.0, 20_001.0]
    assert [len(part) for part in parts] == [10_000] * 3
    again = lender.sent(vector[7:10_007])
    assert torch.equal(again, parts[1])
    view = parts.pop(0)[5:6]
    parts.clear()
    del again
    assert lender.memory.lends(vector)
    assert lender.memory.lends(vector[:1])  # of the same vector
    assert view.item() == 40_005.0
    del view
    assert soon(lambda: not lender.memory.lends(vector))


def test_short_parts_and_what_lies_elsewhere_are_copied(lender: Lender) -> None:
    vector, other = lender.vector(), torch.ones(SIZE)
    held = [lender.sent(vector[:100]), lender.sent(other)]
    assert not lender.memory.lends(vector)
    assert not lender.memory.lends(other)
    vector.zero_()
    other.zero_()
    assert [part.sum().item() for part in held] == [4950.0, float(SIZE)]


def test_who_has_died_reads_no_more(lender: Lender) -> None:
    vector = lender.vector()
    held = lender.sent(vector)
    assert lender.memory.lends(vector)
    for reading in list(lender.incoming._open.values()):  # as if its process had ended
        reading._socket.shutdown(2)
    assert soon(lambda: not lender.memory.lends(vector))
    assert held[1] == 1.0


def test_a_vector_that_nobody_uses_gives_its_segment_to_the_next(lender: Lender) -> None:
    first = lender.vector()
    place = first.data_ptr()
    second = lender.vector()
    assert second.data_ptr() != place
    seen = lender.sent(first)
    del first
    third = lender.vector(SIZE - 1)
    assert third.data_ptr() not in (place, second.data_ptr())
    assert torch.equal(seen, torch.arange(float(SIZE)))
    del seen
    assert soon(lambda: lender.vector().data_ptr() == place)


def test_there_is_a_bound_and_what_is_beyond_is_ordinary(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lent_memory, "_MOST_BYTES", 1 << 20)
    kept = [lender.vector(1 << 16) for _ in range(4)]
    beyond = lender.vector(1 << 16)
    assert lender.memory.find(beyond) is None
    assert not lender.memory.lends(beyond)
    assert torch.equal(lender.sent(beyond), beyond)
    del kept[:2]
    large = lender.vector(1 << 17)  # for which those that are free make room
    assert lender.memory.find(large) is not None
    assert torch.equal(lender.sent(large), large)


def test_dropped_segments_leave_their_numbers(lender: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_memory, "_MOST_SEGMENTS", 1)
    descriptors = len(os.listdir("/proc/self/fd"))
    for turn in range(MOST_SLOTS + 2):
        size = 20_000 * (1 + 3 * (turn % 2))
        assert lender.sent(lender.vector(size))[-1] == size - 1
        assert soon(lambda: all(segment.is_free for segment in lender.memory._segments))
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 4  # a file and its mapping, at both ends


def test_without_memory_all_is_ordinary(lender: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lent_memory, "shared_file", refuse)
    vector = lender.vector()
    assert lender.memory.find(vector) is None
    assert torch.equal(lender.sent(vector), torch.arange(float(SIZE)))


def test_a_segment_and_slots_have_numbers_of_their_own() -> None:
    lending, given_back = LendingSlots(1 << 30), list[int]()
    segment = Segment(1 << 16)
    slot, shown = lending.lend(1 << 16), lending.lend_segment(segment)
    assert slot is not None
    assert shown is not None
    assert (slot.number, shown.number) == (0, 1)
    borrowed = BorrowedSlots(given_back.append)
    borrowed.add(slot.number, slot.descriptor)
    borrowed.add(place_in(shown.number, 4096), shown.descriptor)
    first, second = (borrowed.tensor(place_in(1, start), 10, torch.float32) for start in (4096, 4096))
    assert lending.lends(segment)
    lending.reclaim(1)
    assert not lending.lends(segment)
    assert lending.lend(1 << 16) is not None  # a segment never becomes a slot
    del first, second
    assert given_back == [1, 1]
    segment.drop()


@pytest.mark.parametrize(
    ("place", "elements"),
    [
        (place_in(1, 0), 1),  # no such number
        (place_in(0, 2), 1),  # not on a number's edge
        (place_in(0, 1 << 16), 1),
        (place_in(0, (1 << 16) - 4), 2),
        (place_in(0, 1 << 50), 1),
        (1 << 8, 1),  # a slot begins at its beginning
        (128, 1),
        (-(1 << 8) | MOST_SLOTS, 1),
    ],
)
def test_what_cannot_be_in_a_segment_is_malformed(place: int, elements: int) -> None:
    borrowed = BorrowedSlots(lambda number: None)
    descriptor = shared_file(1 << 16)
    borrowed.add(0, descriptor)
    os.close(descriptor)
    with pytest.raises(MalformedMessage, match="which cannot be"):
        borrowed.tensor(place, elements, torch.float32)

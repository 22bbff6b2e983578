"""Slots: lent, filled, read where they are, given back; bounded, sealed and without a name."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
import torch

from polyrhythm.communication.message import MalformedMessage
from polyrhythm.communication.transports.shared_memory import links
from polyrhythm.communication.transports.shared_memory.links import (
    BorrowedSlots,
    LendingSlots,
    Slot,
    shared_file,
)

MIB = 1 << 20


def _lend(lending: LendingSlots, size: int) -> Slot:
    slot = lending.lend(size)
    assert slot is not None
    return slot


def test_a_file_is_allocated_sealed_and_nameless() -> None:
    before = set(Path("/dev/shm").iterdir())
    descriptor = shared_file(3 * MIB)
    try:
        status = os.fstat(descriptor)
        assert (status.st_size, status.st_blocks * 512) == (3 * MIB, 3 * MIB)
        assert status.st_nlink == 0
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        assert set(Path("/dev/shm").iterdir()) == before
    finally:
        os.close(descriptor)


def test_the_bound_holds_and_free_slots_give_way() -> None:
    lending = LendingSlots(8 * MIB)
    first, second = _lend(lending, 4 * MIB), _lend(lending, 3 * MIB)
    assert lending.lend(2 * MIB) is None
    assert lending.lend(9 * MIB) is None
    lending.reclaim(second.number)
    third = _lend(lending, 4 * MIB)
    assert lending.forgotten == 1 << second.number
    assert third.number == second.number
    assert len(first.memory) + len(third.memory) == 8 * MIB
    lending.mark_notified(1 << second.number)
    assert lending.forgotten == 0


def test_no_memory_is_no_error_but_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(links, "shared_file", refuse)
    lending = LendingSlots(MIB)
    assert lending.lend(10) is None
    assert lending.refused is not None
    assert lending.refused.errno == 28


def test_a_payload_is_read_where_it_was_written_until_its_last_view_is_dropped() -> None:
    lending, given_back = LendingSlots(MIB), list[int]()
    borrowed = BorrowedSlots(given_back.append)
    slot = _lend(lending, 40_000)
    slot.fill(torch.arange(10_000, dtype=torch.float32))
    borrowed.add(slot.number, slot.descriptor)
    tensor = borrowed.tensor(slot.number, 10_000, torch.float32)
    assert torch.equal(tensor, torch.arange(10_000, dtype=torch.float32))
    slot.fill(torch.zeros(1))
    assert tensor[0] == 0
    with pytest.raises(MalformedMessage, match="in slot 0, which cannot be"):
        borrowed.tensor(slot.number, 1, torch.float32)
    view = tensor[5:7]
    del tensor
    assert given_back == []
    borrowed.forget(1)  # what is held stays
    assert view.tolist() == [5.0, 6.0]
    del view
    assert given_back == [slot.number]


@pytest.mark.parametrize(("number", "elements"), [(1, 1), (0, 0), (0, 16_385), (-3, 1)])
def test_what_cannot_be_in_a_slot_is_malformed(number: int, elements: int) -> None:
    slot = _lend(LendingSlots(MIB), 1 << 16)
    borrowed = BorrowedSlots(lambda number: None)
    borrowed.add(0, slot.descriptor)
    with pytest.raises(MalformedMessage, match="which cannot be"):
        borrowed.tensor(number, elements, torch.float32)


def test_a_file_that_could_shrink_is_not_mapped(tmp_path: Path) -> None:
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 4096)
    borrowed = BorrowedSlots(lambda number: None)
    with pytest.raises(MalformedMessage, match="not sealed"):
        borrowed.add(0, loose)
    fcntl.fcntl(loose, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    borrowed.add(0, loose)
    os.close(loose)
    (tmp_path / "plain").write_bytes(b"0" * 4096)
    plain = os.open(tmp_path / "plain", os.O_RDWR)
    with pytest.raises(MalformedMessage, match="cannot be mapped"):
        borrowed.add(1, plain)
    os.close(plain)

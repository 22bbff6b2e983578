"""The layout of the shared memory, and how it is had."""

from __future__ import annotations

import os
import resource

import pytest
import torch

from polyrhythm.communication.transports.shared_memory import exchange
from polyrhythm.communication.transports.shared_memory.exchange import (
    Layout,
    Places,
    SharedBuffer,
    memory_file,
)


@pytest.mark.parametrize("members", [2, 3, 8, 64, 500])
def test_nothing_overlaps_and_all_fits(members: int) -> None:
    layout = Layout(members)
    starts = [layout.start(half, slot) for half in (0, 1) for slot in range(members + 1)]
    assert starts[0] == layout.control_bytes >= 128 + 128 * members
    assert [start - starts[0] for start in starts] == [
        place * layout.slot_bytes for place in range(len(starts))
    ]
    assert starts[-1] + layout.slot_bytes == layout.nbytes
    assert all(start % 4096 == 0 for start in starts)
    assert 4096 <= layout.slot_bytes <= 1 << 20
    assert layout.nbytes <= 66 << 20


def test_two_mappings_are_one_memory() -> None:
    layout = Layout(2)
    descriptor = memory_file(layout.nbytes)
    here, there = SharedBuffer(descriptor, layout), SharedBuffer(descriptor, layout)
    os.close(descriptor)
    here.mark()
    assert here.token == there.token
    assert len(here.token) == 32
    here.words[17] = 2**40
    assert there.words[17] == 2**40
    here.slot(1, 2, torch.float64, 1 << 17).fill_(0.5)
    assert torch.equal(there.slot(1, 2, torch.float64, 1 << 17), torch.full((1 << 17,), 0.5).double())
    assert there.slot(1, 1, torch.float64, 1 << 17).count_nonzero() == 0
    assert there.slot(0, 2, torch.float64, 1 << 17).count_nonzero() == 0
    assert there.words[17] == 2**40


def test_all_pages_are_allocated() -> None:
    descriptor = memory_file(5 << 20)
    try:
        status = os.fstat(descriptor)
        assert status.st_blocks * 512 >= 5 << 20
        assert status.st_nlink == 0  # it has no name, so nothing can be left behind
    finally:
        os.close(descriptor)


def test_too_little_memory_is_an_error_and_leaves_no_descriptor() -> None:
    before, limits = os.listdir("/proc/self/fd"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            memory_file(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_slices_cover_a_vector_and_places_mirror_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_LEAST_SLICE", 1)
    layout = Layout(3)
    descriptor = memory_file(layout.nbytes)
    arena = SharedBuffer(descriptor, layout)
    os.close(descriptor)
    for count in (0, 1, 2, 3, 10):
        cuts = [Places(arena, member).cut(count) for member in range(3)]
        assert [sum(cut) for cut in cuts] == [count] * 3
        assert [cut[0] for cut in cuts] == [0, cuts[0][1], cuts[0][1] + cuts[1][1]]
    assert min(Places(arena, member).cut(10)[1] for member in range(3)) == 3
    arena.slot(0, 1, torch.int32, 10)[:] = torch.arange(10)
    arena.slot(1, 3, torch.int32, 10)[:] = torch.arange(10, 20)
    first, second = Places(arena, 1).of(torch.int32, 10)
    assert first.whole[1].tolist() == list(range(10))
    assert first.mine[1].tolist() == [3, 4, 5]
    assert [part.tolist() for part in first.handing_in] == [[0, 1, 2], [6, 7, 8, 9]]
    assert second.total.tolist() == [13, 14, 15]
    assert [part.tolist() for part in second.totals] == [[10, 11, 12], [16, 17, 18, 19]]
    assert [len(each) for each in Places(arena, 1).of(torch.int32, 0)[0].whole] == [0, 0, 0]


@pytest.mark.parametrize(("count", "adders"), [(4_810, 4), (1, 1), (0, 0), (512 * 1024, 512)])
def test_of_hundreds_of_members_only_so_many_add_as_have_a_slice_worth_it(count: int, adders: int) -> None:
    layout = Layout(512)
    descriptor = memory_file(layout.nbytes)
    arena = SharedBuffer(descriptor, layout)
    os.close(descriptor)
    cuts = [Places(arena, member).cut(count) for member in range(512)]
    assert [sum(cut) for cut in cuts] == [count] * 512
    assert [cut[0] for cut in cuts[1:]] == [before + length for before, length, _ in cuts[:-1]]
    assert sum(length > 0 for _, length, _ in cuts) == adders

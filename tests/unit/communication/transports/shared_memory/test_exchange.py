"""Collectives through an arena, with threads for members."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from polyrhythm.communication.transports.shared_memory import exchange as arena_module
from polyrhythm.communication.transports.shared_memory import exchange as exchange_module
from polyrhythm.communication.transports.shared_memory.barrier import Barrier, Lifelines
from polyrhythm.communication.transports.shared_memory.exchange import (
    Exchange,
    Layout,
    SharedBuffer,
    memory_file,
    rows_memory_like,
    rows_of,
)
from polyrhythm.errors import RequestError

SLOT_BYTES = 4096
SLOT = SLOT_BYTES // 4
SIZES = (0, 1, 2, 3, 7, 8, 1000, SLOT - 1, SLOT, SLOT + 1, 2 * SLOT, 3 * SLOT + 5, 20_011)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_LARGEST_SLOT_BYTES", SLOT_BYTES)


@pytest.fixture(params=[(2, 1), (3, 1), (4, 1), (8, 1), (8, 300)])
def exchanges(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Exchange]:
    """One a member, each with a mapping of its own; the second parameter is the least slice that is worth an adder."""
    members, least = request.param
    monkeypatch.setattr(exchange_module, "_LEAST_SLICE", least)
    layout = Layout(members)
    descriptor = memory_file(layout.nbytes)
    ranks = tuple(range(10, 10 + members))
    made = []
    for member in range(members):
        arena = SharedBuffer(descriptor, layout)
        barrier = Barrier(arena.words, member, ranks, Lifelines([]))
        barrier.patient = True  # threads share Python's lock, so who spins keeps the others from coming
        made.append(Exchange(arena, barrier, member, ranks))
    os.close(descriptor)
    return made


def _together(exchanges: list[Exchange], work: Callable[[Exchange, int], Any]) -> list[Any]:
    """Runs `work` on all members at once; gives its results by member."""
    with ThreadPoolExecutor(len(exchanges)) as threads:
        return list(threads.map(work, exchanges, range(len(exchanges))))


def _vectors(members: int, size: int, seed: int = 0) -> list[Tensor]:
    """Gives floats whose sum depends on the order of adding."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(size, generator=generator) * 10 ** torch.randn(size, generator=generator)
        for _ in range(members)
    ]


def _sum_in_rank_order(vectors: list[Tensor]) -> Tensor:
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total = total + vector
    return total


def test_sums_have_the_bits_of_adding_in_rank_order(exchanges: list[Exchange]) -> None:
    cases = [_vectors(len(exchanges), size, seed=size) for size in SIZES]

    def work(exchange: Exchange, member: int) -> list[Tensor]:
        mine = [case[member].clone() for case in cases]
        for vector in mine:
            exchange.all_reduce(vector)
        return mine

    sums = _together(exchanges, work)
    for place, case in enumerate(cases):
        expected = _sum_in_rank_order(case)
        assert all(torch.equal(sums[member][place], expected) for member in range(len(exchanges)))


def test_every_dtype_is_added_up(exchanges: list[Exchange]) -> None:
    def vector(dtype: torch.dtype, member: int) -> Tensor:
        return (torch.arange(9001) % 5 + member % 3).to(dtype)  # small enough to be exact in all

    def work(exchange: Exchange, member: int) -> list[Tensor]:
        mine = [vector(dtype, member) for dtype in DTYPES]
        for each in mine:
            exchange.all_reduce(each)
        return mine

    members = len(exchanges)
    expected = (torch.arange(9001) % 5) * members + sum(member % 3 for member in range(members))
    for sums in _together(exchanges, work):
        for dtype, total in zip(DTYPES, sums, strict=True):
            assert total.dtype is dtype
            assert torch.equal(total.to(torch.int64), expected)


def test_broadcast_takes_the_roots_bits_of_any_dtype(exchanges: list[Exchange]) -> None:
    dtypes = (*DTYPES, torch.bool, torch.complex64)

    def vector(dtype: torch.dtype, member: int) -> Tensor:
        return ((torch.arange(10_007) + member) % 3).to(dtype)

    def work(exchange: Exchange, member: int) -> list[Tensor]:
        taken = []
        for root in range(len(exchanges)):
            for dtype in dtypes:
                taken.append(vector(dtype, member))
                exchange.broadcast(taken[-1], root)
        return taken

    expected = [vector(dtype, root) for root in range(len(exchanges)) for dtype in dtypes]
    for taken in _together(exchanges, work):
        assert all(torch.equal(one, other) for one, other in zip(taken, expected, strict=True))


def test_nobody_passes_the_barrier_before_all_have_come(exchanges: list[Exchange]) -> None:
    come: list[int] = []

    def work(exchange: Exchange, member: int) -> list[int]:
        seen = []
        for turn in range(1, 6):
            come.append(turn)
            exchange.barrier()
            seen.append(come.count(turn))
        return seen

    assert _together(exchanges, work) == [[len(exchanges)] * 5] * len(exchanges)


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (lambda exchange: exchange.all_reduce(torch.ones(5)), "all_reduce with 5 elements of float32"),
        (
            lambda exchange: exchange.all_reduce(torch.ones(6).double()),
            "all_reduce with 6 elements of float64",
        ),
        (lambda exchange: exchange.all_reduce(torch.ones(9000)), "all_reduce with 9000 elements of float32"),
        (
            lambda exchange: exchange.broadcast(torch.ones(6), 1),
            "broadcast from 1 with 6 elements of float32",
        ),
        (lambda exchange: exchange.barrier(), "barrier"),
    ],
)
def test_members_that_disagree_are_told_and_may_go_on(
    exchanges: list[Exchange], ours: Callable[[Exchange], None], words: str
) -> None:
    last = len(exchanges) - 1

    def work(exchange: Exchange, member: int) -> tuple[str, float]:
        with pytest.raises(RequestError) as caught:
            ours(exchange) if member == last else exchange.all_reduce(torch.ones(6))
        vector = torch.ones(3000)
        exchange.all_reduce(vector)
        return str(caught.value), vector.sum().item()

    said = (
        f"rank 10 called all_reduce with 6 elements of float32, rank {10 + last} {words}: call the same collective "
        "with the same dtype and size on all ranks"
    )
    assert _together(exchanges, work) == [(said, 3000.0 * len(exchanges))] * len(exchanges)


SPLITS = ((0, 20_011), (0, 7000), (7000, 20_011), (4097, 9000), (20_000, 20_011), (5, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_that_all_see_are_added_up_where_they_lie(
    exchanges: list[Exchange], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "_PIECE_BYTES", 8 * 997)  # several pieces, the last one shorter
    members = len(exchanges)
    wanted = [vector.to(dtype) for vector in _vectors(members, 20_011)]
    memory = torch.zeros_like(rows_memory_like(members, wanted[0]), device="cpu")
    rows = rows_of(memory, members, wanted[0])
    expected = _sum_in_rank_order(wanted)

    def work(exchange: Exchange, member: int) -> None:
        own = exchange.in_place.add(rows)
        for start, stop in SPLITS:
            own.copy_(wanted[member])
            exchange.barrier()
            exchange.all_reduce(own[start:stop])
            assert torch.equal(own[start:stop], expected[start:stop])
            assert torch.equal(own[:start], wanted[member][:start])
            assert torch.equal(own[stop:], wanted[member][stop:])
            exchange.barrier()

    _together(exchanges, work)
    assert all(row.data_ptr() % 64 == memory.data_ptr() % 64 for row in rows)


def test_a_vector_of_its_own_beside_one_that_all_see_is_an_error_everywhere(
    exchanges: list[Exchange],
) -> None:
    members = len(exchanges)
    like = torch.zeros(20_011)
    rows = rows_of(torch.zeros_like(rows_memory_like(members, like), device="cpu"), members, like)

    def work(exchange: Exchange, member: int) -> None:
        own = exchange.in_place.add(rows)
        with pytest.raises(RequestError, match="all_reduce_in_place"):
            exchange.all_reduce(torch.zeros(20_011) if member == 1 else own)
        exchange.all_reduce(own.fill_(1.0))
        assert torch.equal(own, torch.full((20_011,), float(members)))

    _together(exchanges, work)

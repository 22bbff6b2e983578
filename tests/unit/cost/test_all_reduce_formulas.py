"""The formulas of all-reduce against the textbooks' table, written down here a second time."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor, log2, sqrt

import pytest
import torch

from polyrhythm.cost import all_reduce
from polyrhythm.cost.machine import Machine, Payload

A, B, G = 3e-5, 8e-9, 5e-10
BLOCKING = Machine(overhead_s=A, seconds_per_byte=B, reduce_seconds_per_byte=G)
"""Every message costs all of alpha, as in the textbooks."""

Formula = Callable[[Machine, int, Payload], float]


def _folds(n: int) -> int:
    return int(log2(n) != floor(log2(n)))


TABLE: dict[Formula, Callable[[int, float], float]] = {
    all_reduce.flat_s: lambda n, m: 2 * (n - 1) * (A + B * m) + (n - 1) * G * m,
    all_reduce.binomial_tree_s: lambda n, m: 2 * ceil(log2(n)) * (A + B * m) + ceil(log2(n)) * G * m,
    all_reduce.recursive_doubling_s: lambda n, m: (
        floor(log2(n)) * (A + B * m + G * m) + _folds(n) * (2 * (A + B * m) + G * m)
    ),
    all_reduce.ring_s: lambda n, m: 2 * (n - 1) * A + 2 * (n - 1) / n * B * m + (n - 1) / n * G * m,
    all_reduce.rabenseifner_s: lambda n, m: (
        2 * floor(log2(n)) * A
        + (2 * B + G) * (1 - 0.5 ** floor(log2(n))) * m
        + _folds(n) * (2 * (A + B * m) + G * m)
    ),
    all_reduce.direct_s: lambda n, m: 2 * (n - 1) * A + 2 * (n - 1) / n * B * m + (n - 1) / n * G * m,
    all_reduce.whole_s: lambda n, m: (n - 1) * (A + B * m + G * m),
    lambda machine, n, payload: all_reduce.segmented_chain_s(machine, n, payload, 12): lambda n, m: (
        2 * (n + 12 - 2) * (A + B * m / 12) + (n + 12 - 2) * G * m / 12
    ),
}
DIVISIBLE = 720720 * 17  # by all numbers up to 17


@pytest.mark.parametrize("formula", TABLE)
def test_whole_slices_take_the_tables_time(formula: Formula) -> None:
    for ranks in range(2, 18):
        payload = Payload(DIVISIBLE, 4)
        assert formula(BLOCKING, ranks, payload) == pytest.approx(
            TABLE[formula](ranks, payload.nbytes), rel=1e-12
        )


@pytest.mark.parametrize("formula", TABLE)
def test_nothing_is_quicker_than_the_lower_bound(formula: Formula) -> None:
    machines = [
        Machine(latency_s=A, seconds_per_byte=B, header_bytes=64),
        Machine(latency_s=A, seconds_per_byte=B, shared_receiver=False),
        Machine(seconds_per_byte=B, reduce_seconds_per_byte=G),
        Machine(overhead_s=A, latency_s=A),
        Machine(reduce_seconds_per_byte=G),
    ]
    for machine in machines:
        for ranks in range(2, 40):
            for elements in (0, 1, ranks + 1, 10_007):
                payload = Payload(elements, 4)
                bound_s = all_reduce.lower_bound_s(machine, ranks, payload)
                assert formula(machine, ranks, payload) >= bound_s * (1 - 1e-12), (machine, ranks, elements)


@pytest.mark.parametrize("formula", TABLE)
def test_one_rank_needs_no_time(formula: Formula) -> None:
    assert formula(BLOCKING, 1, Payload(100)) == 0


def test_messages_in_a_row_overlap_their_latency() -> None:
    pure = Machine(latency_s=A, seconds_per_byte=B)
    payload = Payload(DIVISIBLE, 4)
    wire_s = 2 * 7 / 8 * payload.nbytes * B
    assert all_reduce.direct_s(pure, 8, payload) == pytest.approx(2 * A + wire_s, rel=1e-12)
    assert all_reduce.ring_s(pure, 8, payload) == pytest.approx(14 * A + wire_s, rel=1e-12)


def test_headers_count_once_a_message() -> None:
    with_headers = Machine(latency_s=A, seconds_per_byte=B, header_bytes=64)
    without = Machine(latency_s=A, seconds_per_byte=B)
    difference_s = all_reduce.ring_s(with_headers, 5, Payload(1000)) - all_reduce.ring_s(
        without, 5, Payload(1000)
    )
    assert difference_s == pytest.approx(8 * 64 * B, rel=1e-9)


@pytest.mark.parametrize("ranks", [2, 3, 5, 16])
@pytest.mark.parametrize("elements", [0, 10, 5000, 1_000_000])
def test_the_best_segments_are_the_best_that_a_search_finds(ranks: int, elements: int) -> None:
    payload = Payload(elements, 4)
    best = all_reduce.best_segments(A / B, ranks, payload)
    most = max(1, min(elements, 400))
    estimated_s = [
        all_reduce.segmented_chain_s(BLOCKING, ranks, payload, count) for count in range(1, most + 1)
    ]
    assert 1 <= best <= max(1, elements)
    assert all_reduce.segmented_chain_s(BLOCKING, ranks, payload, best) <= min(estimated_s) * 1.01
    if ranks > 2 and elements == 1_000_000:
        assert best == pytest.approx(sqrt((ranks - 2) * B * payload.nbytes / A), abs=0.5)


@pytest.mark.parametrize(("elements", "of"), [(0, 3), (2, 3), (10, 4), (12, 4), (7, 1)])
def test_slices_are_those_of_tensor_split(elements: int, of: int) -> None:
    expected = [piece.numel() * 8 for piece in torch.zeros(elements).tensor_split(of)]
    assert Payload(elements, 8).slice_bytes(of) == expected
    assert [Payload(elements, 8).first_bytes(k, of) for k in range(of + 1)] == [
        sum(expected[:k]) for k in range(of + 1)
    ]


def test_logarithms_of_whole_numbers() -> None:
    for number in range(1, 2000):
        assert all_reduce.floor_log2(number) == floor(log2(number))
        assert all_reduce.ceil_log2(number) == ceil(log2(number))

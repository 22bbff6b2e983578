"""Digests: every flipped bit changes them; and what follows from the digests of all members."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyrhythm.roles.control_messages import StateDigests
from polyrhythm.roles.digests import DigestComparison, Gathering, Verdict, digest_of, rounding
from polyrhythm.roles.tree_of_members import FAN

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8]
SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=3) | st.lists(
    st.integers(8_000, 40_000), max_size=3
)


def filled(sizes: list[int], dtype: torch.dtype, offset: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    made = [torch.randint(-100, 100, (size + offset,), generator=generator) for size in sizes]
    return [tensor.to(dtype)[offset:] for tensor in made]


@settings(deadline=None, max_examples=200)
@given(SIZES, st.sampled_from(DTYPES), st.integers(0, 1), st.data())
def test_every_flipped_bit_changes_the_digest(
    sizes: list[int], dtype: torch.dtype, offset: int, data: st.DataObject
) -> None:
    tensors = filled(sizes, dtype, offset)
    before = digest_of(tensors)
    assert digest_of([tensor.clone() for tensor in tensors]) == before
    places = [(tensor, 8 * tensor.nbytes) for tensor in tensors if tensor.nbytes]
    for tensor, bits in places:
        bit = data.draw(st.integers(0, bits - 1))
        raw = tensor.view(torch.uint8)
        raw[bit // 8] ^= 1 << bit % 8
        assert digest_of(tensors) != before
        raw[bit // 8] ^= 1 << bit % 8
    assert digest_of(tensors) == before


@settings(deadline=None, max_examples=100)
@given(st.sampled_from([1_000, 50_000]), st.integers(0, 999), st.integers(0, 999), st.integers(0, 31))
def test_two_flips_and_an_exchange_of_two_values_change_it(size: int, one: int, other: int, bit: int) -> None:
    assume(
        (one - other) % (2 * 257)
    )  # else both may be in one column of a long state's table, and cancel out
    [vector] = filled([size], torch.float32, 0)
    vector += torch.arange(size)
    before, words = digest_of([vector]), vector.view(torch.int32)
    assume(words[one] != words[other])
    mask = 1 << bit if bit < 31 else -(1 << 31)
    for place in (one, other):
        words[place] ^= mask
    assert digest_of([vector]) != before
    for place in (one, other):
        words[place] ^= mask
    words[[one, other]] = words[[other, one]]
    assert digest_of([vector]) != before


def digests(worker: int, number: int, step: int, digest: int, rounding: int = 0) -> StateDigests:
    return StateDigests(number, step, ((digest, rounding, (worker,)),))


def test_members_that_round_differently_are_not_compared() -> None:
    comparison = DigestComparison()
    assert comparison.add(digests(0, 0, 20, 5, 1), 0, (0, 1)) is None
    assert comparison.add(digests(1, 0, 20, 6, 2), 0, (0, 1)) is None


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 99), unique=True, max_size=40).map(sorted),
    st.lists(st.integers(0, 39)),
    st.data(),
)
def test_digests_reach_the_coordinator_along_a_tree(
    others: list[int], odd: list[int], data: st.DataObject
) -> None:
    """In any order of taking and receiving; no member receives more than `FAN` messages."""
    members = (0, *others)
    differing = tuple(sorted({members[place] for place in odd if place < len(members)}))
    nodes = {worker: Gathering(worker) for worker in others}
    comparison, found, received = DigestComparison(), [], Counter[int]()
    waiting = [(worker, digests(worker, 7, 20, 6 if worker in differing else 5)) for worker in members]
    while waiting:
        worker, message = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
        if worker == 0:
            found.append(comparison.add(message, 7, members))
        elif (gathered := nodes[worker].add(message, 7, members)) is not None:
            waiting.append((nodes[worker].parent, gathered))
            received[nodes[worker].parent] += 1
    assert max(received.values(), default=0) <= FAN
    assert found[:-1] == [None] * (len(found) - 1)
    majority = abs(len(members) - 2 * len(differing)) > 0
    usual_is_odd = 2 * len(differing) > len(members)
    expected = tuple(sorted({*members} - {*differing})) if usual_is_odd else differing
    assert found[-1] == Verdict(20, None, expected if majority else members, majority)


def test_rounding_depends_on_the_number_of_threads() -> None:
    device, threads = torch.device("cpu"), torch.get_num_threads()
    before = rounding(device)
    assert rounding(device) == before
    try:
        torch.set_num_threads(threads + 1)
        assert rounding(device) != before
    finally:
        torch.set_num_threads(threads)

"""One collective, without a network: frames are carried by hand, in any order that connections allow."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch
from torch import Tensor

from polyrhythm.communication.transports.between_hosts.addition import (
    HEADER_BYTES,
    Addition,
    Frame,
    Outgoing,
    Phase,
    shape_of,
)
from polyrhythm.cost.all_reduce import WHOLE_BYTES
from polyrhythm.errors import RunError

SIZES = (1, 7, 1000, WHOLE_BYTES // 4 + 1, 70_001)


class Post:
    """Carries frames between members, in the order of each connection and else at random."""

    def __init__(self, additions: list[Addition], seed: int) -> None:
        self.additions = additions
        self.random = random.Random(seed)
        self.ways: dict[tuple[int, int], deque[Outgoing]] = {}
        self.carried = 0

    def take(self, source: int, frames: list[Outgoing]) -> None:
        for frame in frames:
            self.ways.setdefault((source, frame.to), deque()).append(frame)

    def carry(self, most: int = 1 << 30) -> None:
        """Carries so many frames, or all."""
        for _ in range(most):
            ways = [way for way, waiting in self.ways.items() if waiting]
            if not ways:
                return
            source, to = self.random.choice(ways)
            outgoing = self.ways[source, to].popleft()
            frame = Frame.decode(outgoing.header)
            self.additions[to].target(source, frame)[:] = outgoing.payload
            outgoing.addition.unsent -= 1
            self.carried += HEADER_BYTES + len(outgoing.payload)
            self.take(to, self.additions[to].arrived(source, frame))


def random_vectors(size: int, count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [
        (torch.randn(count, generator=generator) * 10 ** torch.randn(count, generator=generator)).to(dtype)
        for _ in range(size)
    ]


def sum_in_order(vectors: list[Tensor]) -> Tensor:
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total = total + vector
    return total


def additions_of(vectors: list[Tensor]) -> list[Addition]:
    size = len(vectors)
    return [Addition(member, size, 1, shape_of(vectors[member])) for member in range(size)]


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_everyone_has_the_sum_in_the_order_of_members(size: int, count: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        vectors = random_vectors(size, count, dtype)
        expected = sum_in_order(vectors)
        post = Post(additions_of(vectors), seed=size)
        for member, addition in enumerate(post.additions):
            post.take(member, addition.begin(vectors[member], range(size)))
            post.carry(3)  # so later members find parts that have come before they began
            assert not addition.done or member == size - 1
        post.carry()
        assert all(addition.done for addition in post.additions)
        assert all(torch.equal(vector, expected) for vector in vectors)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("root", [0, 2])
def test_a_broadcast_brings_the_roots_also_to_who_comes_late(root: int, count: int) -> None:
    vectors = random_vectors(4, count)
    expected = vectors[root].clone()
    post = Post(additions_of(vectors), seed=root)
    for member in (root, 3, 1, 2 - root):
        post.take(member, post.additions[member].begin(vectors[member], (root,)))
        post.carry(50)
    post.carry()
    assert all(addition.done for addition in post.additions)
    assert all(torch.equal(vector, expected) for vector in vectors)


def test_what_travels_is_the_least_that_any_algorithm_can() -> None:
    vectors = random_vectors(3, 300_000)
    post = Post(additions_of(vectors), seed=0)
    for member, addition in enumerate(post.additions):
        post.take(member, addition.begin(vectors[member], range(3)))
    post.carry()
    least = 3 * 2 * vectors[0].nbytes * 2 // 3
    assert least < post.carried < 1.005 * least


def test_a_small_vector_is_there_after_one_latency() -> None:
    vectors = random_vectors(3, 1000)
    post = Post(additions_of(vectors), seed=0)
    for member, addition in enumerate(post.additions):
        post.take(member, addition.begin(vectors[member], range(3)))
    waiting = sum(map(len, post.ways.values()))
    post.carry(waiting)  # and nothing that was sent for what has come
    assert all(addition.done for addition in post.additions)


def test_what_many_members_add_up_is_cut_before_its_bytes_take_longer_than_a_latency() -> None:
    vectors = random_vectors(4, 5000)
    post = Post(additions_of(vectors), seed=0)
    for member, addition in enumerate(post.additions):
        post.take(member, addition.begin(vectors[member], range(4)))
    post.carry()
    slices = 4 * 2 * vectors[0].nbytes * 3 // 4
    assert slices < post.carried < 1.1 * slices  # whole, it would be twice as many


def test_a_run_is_handed_on_before_the_rest_has_come() -> None:
    vectors = random_vectors(2, 400_000)
    post = Post(additions_of(vectors), seed=0)
    for member, addition in enumerate(post.additions):
        post.take(member, addition.begin(vectors[member], range(2)))
    parts = len(post.ways[0, 1])
    post.carry(1)
    assert parts > 4
    assert sum(map(len, post.ways.values())) == 2 * parts  # one has come, and its sum has set out


def test_others_who_add_up_something_else_are_an_error() -> None:
    addition = Addition(0, 2, 1, shape_of(torch.ones(5)))
    with pytest.raises(
        RunError, match=r"adds up 5 numbers of 4 bytes where another has 6 of 4: all must give"
    ):
        addition.begin(torch.ones(6), (0, 1))
    with pytest.raises(RunError, match="all must give tensors of one size and dtype"):
        addition.target(1, Frame(1, Phase.PART, shape_of(torch.ones(5, dtype=torch.int32)), 0, 20))


@pytest.mark.parametrize(
    ("phase", "offset", "nbytes"), [(Phase.PART, 0, 16), (Phase.PART, 64, 20), (Phase.SUM, 0, 20)]
)
def test_bytes_that_belong_nowhere_are_refused(phase: Phase, offset: int, nbytes: int) -> None:
    shape = shape_of(torch.ones(5))
    with pytest.raises(RunError, match="no part of it"):
        Addition(0, 2, 1, shape).target(1, Frame(1, phase, shape, offset, nbytes))


def test_a_header_that_is_none_is_refused() -> None:
    with pytest.raises(RunError, match="no part of one"):
        Frame.decode(bytes(HEADER_BYTES))

"""Graphs against brute force."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
import torch

from polyrhythm.strategies.topology import mixing_rate, turns_to_all, unreached


def drawn(peers: int, seed: int) -> list[list[int]]:
    """Draws whom each peer sends to; always to the next one, so that a word gets around."""
    random = Random(seed)
    return [
        sorted({(peer + 1) % peers} | {to for to in range(peers) if to != peer and random.random() < 0.2})
        for peer in range(peers)
    ]


def test_who_cannot_be_reached() -> None:
    edges = {0: [1], 1: [2], 2: [0], 3: [2]}
    assert unreached(4, edges.__getitem__) == 3
    assert unreached(3, edges.__getitem__) is None
    assert unreached(1, lambda peer: []) is None


@pytest.mark.parametrize("seed", range(10))
def test_a_word_is_everywhere_after_as_many_turns_as_the_longest_shortest_path(seed: int) -> None:
    peers = 7
    targets = drawn(peers, seed)
    reach = torch.eye(peers, dtype=torch.int64)
    for peer, others in enumerate(targets):
        reach[others, peer] = 1
    power, turns = torch.eye(peers, dtype=torch.int64), 0
    while not power.bool().all():
        power, turns = (reach @ power).clamp(max=1), turns + 1
    sources = [[peer for peer in range(peers) if to in targets[peer]] for to in range(peers)]
    assert turns_to_all([sources]) == turns


def test_turns_of_a_schedule_count_from_its_worst_beginning() -> None:
    """Worker 0 hears 1 in even turns, worker 1 hears 0 in odd ones: two turns, whichever comes first."""
    assert turns_to_all([[[1], []], [[], [0]]]) == 2
    # in the third turn nobody talks
    assert turns_to_all([[[1], []], [[], [0]], [[], []]]) == 3
    assert turns_to_all([[[]]]) == 0


def test_the_rate_of_a_product_is_that_of_a_turn() -> None:
    half = torch.full((2, 2), 0.5, dtype=torch.float64)
    slow = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64)
    slower = torch.tensor([[0.95, 0.05], [0.05, 0.95]], dtype=torch.float64)
    assert mixing_rate([half]) == 0
    assert mixing_rate([slow]) == pytest.approx(0.8)
    assert mixing_rate([slow, slower]) == pytest.approx((0.8 * 0.9) ** 0.5)
    assert mixing_rate([torch.ones(1, 1, dtype=torch.float64)]) == 0


@pytest.mark.parametrize(("peers", "seed"), list(product([3, 6], range(3))))
def test_differences_shrink_by_the_rate_in_the_long_run(peers: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(peers, peers, generator=generator, dtype=torch.float64) + 0.1
    matrix = weights / weights.sum(0)
    values = torch.eye(peers, dtype=torch.float64)
    limit = torch.linalg.matrix_power(matrix, 200)
    early, late = (((torch.linalg.matrix_power(matrix, turns) - limit) @ values).norm() for turns in (10, 12))
    assert float(late / early) == pytest.approx(mixing_rate([matrix]) ** 2, rel=0.15)

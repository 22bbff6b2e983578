"""The shapes that traffic follows from: trees, and who is folded into whom. Its counts are tested on messages."""

from __future__ import annotations

import pytest

from polyrhythm.cost.all_reduce import Sent, children, core_size, fold_partner, rabenseifner, ring
from polyrhythm.cost.machine import Payload


@pytest.mark.parametrize("ranks", range(1, 40))
def test_every_rank_but_the_root_is_somebodys_child_once(ranks: int) -> None:
    named = [child for rank in range(ranks) for child in children(ranks, rank)]
    assert sorted(named) == list(range(1, ranks))


def test_a_tree_by_hand() -> None:
    assert [children(7, rank) for rank in range(7)] == [[1, 2, 4], [], [3], [], [5, 6], [], []]


@pytest.mark.parametrize("ranks", range(1, 70))
def test_partners_in_folding_are_each_others(ranks: int) -> None:
    core = core_size(ranks)
    assert core <= ranks < 2 * core
    for rank in range(ranks):
        partner = fold_partner(ranks, rank)
        if rank >= core:
            assert partner is not None
            assert partner < core
        if partner is not None:
            assert fold_partner(ranks, partner) == rank
    assert sum(fold_partner(ranks, rank) is not None for rank in range(core)) == ranks - core


def test_folding_by_hand() -> None:
    assert [fold_partner(7, rank) for rank in range(7)] == [5, None, 6, 4, 3, 0, 2]


def test_rabenseifner_by_hand() -> None:
    # Rank 1 of 4 with slices of 3, 3, 2, 2 numbers: gives 2, 3 away, then 0; has 1 to give back, then 0 and 1.
    assert rabenseifner(4, 1, Payload(10, 1)) == Sent(4, (2 + 2) + 3 + 3 + (3 + 3))


def test_ring_by_hand() -> None:
    # Rank 0 of 3 sends slices 2 and 1, and when its own is whole, 0 and 2.
    assert ring([5, 4, 3], 0) == Sent(4, (3 + 4) + (5 + 3))
    assert ring([9], 0) == Sent()

"""PipeDream's dynamic program finds what trying all cuts and copies finds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise, product
from random import Random

import pytest

from polyrhythm.partition.outlook import LayerCost, planned


def seconds_of(
    layers: Sequence[LayerCost], bounds: Sequence[int], copies: Sequence[int], bandwidth_bytes_per_s: float
) -> float:
    """Return the seconds between two minibatches of given stages."""
    found = []
    for (start, stop), ranks in zip(pairwise(bounds), copies, strict=True):
        own = layers[start:stop]
        exchanged = 2 * (ranks - 1) / ranks * sum(each.weight_bytes for each in own) / bandwidth_bytes_per_s
        found.append(max(sum(each.seconds for each in own), exchanged) / ranks)
    for cut, pair in zip(bounds[1:-1], pairwise(copies), strict=True):
        found.append(2 * layers[cut - 1].output_bytes / bandwidth_bytes_per_s / min(pair))
    return max(found)


def least(layers: list[LayerCost], ranks: int, bandwidth: float) -> float:
    """Tries all cuts into stages and all ways to share the ranks out."""
    found = float("inf")
    for stages in range(1, min(len(layers), ranks) + 1):
        for cuts in combinations(range(1, len(layers)), stages - 1):
            for copies in product(range(1, ranks + 1), repeat=stages):
                if sum(copies) == ranks:
                    bounds = (0, *cuts, len(layers))
                    found = min(found, seconds_of(layers, bounds, copies, bandwidth))
    return found


def chain(random: Random) -> list[LayerCost]:
    return [
        LayerCost(random.uniform(0.1, 2.0), random.choice([0.0, 1.0, 30.0]), random.uniform(0.0, 4.0))
        for _ in range(random.randint(1, 7))
    ]


def test_it_finds_the_best_of_200_small_chains() -> None:
    several = 0
    for seed in range(200):
        random = Random(seed)
        layers, ranks, bandwidth = chain(random), random.randint(1, 5), random.choice([1.0, 10.0, 1e9])
        plan = planned(layers, ranks, bandwidth)
        assert plan.seconds == pytest.approx(least(layers, ranks, bandwidth), rel=1e-12)
        assert plan.seconds == pytest.approx(
            seconds_of(layers, plan.bounds, plan.copies, bandwidth), rel=1e-12
        )
        assert sum(plan.copies) == ranks
        several += len(plan.copies) > 1
    assert 50 < several < 195


def test_data_parallel_where_links_cost_nothing_and_stages_where_weights_are_dear() -> None:
    small = [LayerCost(1.0, 1.0, 1.0)] * 4
    assert planned(small, 4, 1e9).copies == (4,)
    heavy = [LayerCost(1.0, 100.0, 0.01)] * 4
    assert planned(heavy, 4, 1.0).copies == (1, 1, 1, 1)
    early = [LayerCost(3.0, 0.0, 0.1), LayerCost(1.0, 100.0, 0.1)]
    assert planned(early, 4, 1.0).copies == (3, 1)

"""Topologies: neighbors and weights by hand, and spectral gaps by their closed formulas."""

from __future__ import annotations

from math import cos, log2, pi

import pytest
import torch

from polyrhythm.errors import RequestError
from polyrhythm.specs import build, choices
from polyrhythm.strategies.topology import TOPOLOGIES, Topology

SPECS = [
    *(name for name in choices(TOPOLOGIES) if name != "file"),
    "torus(rows=2)",
    "random_regular(degree=2, seed=5)",
]
SIZES = [1, 4, 6, 8, 12, 16]


def topology(spec: str) -> Topology:
    built = build("topology", spec, TOPOLOGIES)
    assert isinstance(built, Topology)
    return built


@pytest.mark.parametrize("peers", SIZES)
@pytest.mark.parametrize("spec", SPECS)
def test_what_each_gives_is_what_the_others_take(spec: str, peers: int) -> None:
    graph = topology(spec)
    graph.check(peers)
    for turn in range(graph.period(peers)):
        shares = [graph.shares(peer, peers, turn) for peer in range(peers)]
        for peer, entry in enumerate(shares):
            assert peer not in entry.gives
            assert list(entry.gives) == sorted(entry.gives)
            assert list(entry.takes) == sorted(entry.takes)
            assert entry.own > 0
            assert entry.own + sum(entry.gives.values()) == pytest.approx(1)
            assert all(shares[to].takes[peer] == weight for to, weight in entry.gives.items())
        assert sum(len(entry.takes) for entry in shares) == sum(len(entry.gives) for entry in shares)


@pytest.mark.parametrize("peers", SIZES)
@pytest.mark.parametrize("spec", SPECS)
def test_matrices_keep_the_mean(spec: str, peers: int) -> None:
    graph = topology(spec)
    ones = torch.ones(peers, dtype=torch.float64)
    for turn in range(graph.period(peers)):
        matrix = graph.matrix(peers, turn)
        torch.testing.assert_close(matrix.sum(0), ones)
        torch.testing.assert_close(matrix.sum(1), ones)
        assert (matrix >= 0).all()


@pytest.mark.parametrize("spec", ["ring", "torus", "complete", "star", "random_regular"])
def test_metropolis_weights(spec: str) -> None:
    """1/(1 + the larger degree), and symmetric."""
    matrix = topology(spec).matrix(8)
    torch.testing.assert_close(matrix, matrix.T, rtol=0, atol=0)
    degrees = (matrix > 0).sum(0) - 1
    for i in range(8):
        for j in range(8):
            if i != j and matrix[i, j]:
                assert float(matrix[i, j]) == 1 / (1 + max(int(degrees[i]), int(degrees[j])))


@pytest.mark.parametrize("peers", [3, 4, 5, 8, 17])
def test_the_gap_of_a_ring(peers: int) -> None:
    rate = max(abs(1 / 3 + 2 / 3 * cos(2 * pi * k / peers)) for k in range(1, peers))
    assert topology("ring").rate(peers) == pytest.approx(rate)
    assert rate == pytest.approx(1 / 3 + 2 / 3 * cos(2 * pi / peers)) or peers == 3


@pytest.mark.parametrize(("spec", "peers", "gap"), [
    ("ring", 8, 1 - 0.80474),
    ("ring", 4, 2 / 3),
    ("torus", 64, 1 - 0.88284),
    ("exponential", 16, 0.4),
    ("complete", 7, 1.0),
    ("star", 9, 1 / 9),
])  # fmt: skip
def test_gaps_that_are_known(spec: str, peers: int, gap: float) -> None:
    assert topology(spec).spectral_gap(peers) == pytest.approx(gap, abs=6e-6)


@pytest.mark.parametrize("peers", [2, 4, 8, 16])
def test_one_peer_a_turn_gives_the_exact_mean(peers: int) -> None:
    """Bit for bit: halves of whole numbers, after log2 N turns."""
    graph = topology("one_peer_exponential")
    assert graph.period(peers) == log2(peers)
    values = torch.arange(peers, dtype=torch.float64)[:, None] ** 2 * torch.tensor(
        [1.0, -3.0, 1024.0], dtype=torch.float64
    )
    mixed = values
    for turn in range(graph.period(peers)):
        mixed = graph.matrix(peers, turn) @ mixed
    assert torch.equal(mixed, values.mean(0).expand_as(mixed))
    assert graph.spectral_gap(peers) == 1


@pytest.mark.parametrize(
    ("peers", "degree"), [(4, 3), (6, 5), (7, 6), (10, 3), (9, 4), (16, 13), (60, 2), (300, 4)]
)
def test_random_graphs_are_regular_and_in_one_piece(peers: int, degree: int) -> None:
    graph = topology(f"random_regular(degree={degree})")
    graph.check(peers)
    neighbors = [graph.targets(peer, peers) for peer in range(peers)]
    assert all(len(set(entry)) == degree for entry in neighbors)
    assert all(peer in neighbors[other] for peer in range(peers) for other in neighbors[peer])
    graph.check_connected(peers)


def test_random_graphs_depend_on_their_seed_alone() -> None:
    one, other = (topology(f"random_regular(seed={seed})") for seed in (1, 2))
    assert [one.targets(peer, 20) for peer in range(20)] != [other.targets(peer, 20) for peer in range(20)]
    assert topology("random_regular(seed=1)").targets(0, 20) == one.targets(0, 20)


@pytest.mark.parametrize(("spec", "peers", "complaint"), [
    ("torus", 7, r"^topology torus: 7 workers make no rows and columns: ask for 8, or take topology ring$"),
    ("torus(rows=3)", 8, r"8 workers do not fill 3 rows .*: ask for a multiple of 3, such as 6$"),
    ("random_regular(degree=8)", 8, r"8 workers have 7 others each: ask for a degree of at most 7$"),
    ("random_regular", 7, r"7 workers cannot all have 3 neighbors.*: ask for degree 2, or for 8 workers$"),
    ("random_regular(degree=1)", 4, r"pairs fall apart: ask for a degree of at least 2$"),
])  # fmt: skip
def test_numbers_of_workers_that_a_graph_cannot_have(spec: str, peers: int, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint) as caught:
        topology(spec).check(peers)
    assert "\n" not in str(caught.value)

"""Random regular graph: the same number of neighbors for every worker, drawn from a seed.

Steger, Wormald, "Generating random regular graphs quickly", Combinatorics, Probability and Computing 1999: ends of
edges are paired at random, but never to a loop or to an existing edge; a failed attempt is restarted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from random import Random

from pydantic import Field

from polyrhythm.errors import RequestError
from polyrhythm.strategies.topology import Topology, unreached


class RandomRegular(Topology):
    """Every worker has the same number of neighbors; almost always about as good as a graph can be.

    Attributes:
        degree: neighbors of each.
        seed: seed of the draw.
    """

    degree: int = Field(default=3, ge=1)
    seed: int = 0

    def targets(self, peer: int, peers: int, turn: int = 0) -> Sequence[int]:
        return _drawn(peers, self.degree, self.seed)[peer] if peers > 1 else ()

    def check(self, peers: int) -> None:
        if peers == 1:
            return
        if self.degree >= peers:
            raise RequestError(
                f"topology {self}: {peers} workers have {peers - 1} others each: ask for a degree of at most "
                f"{peers - 1}"
            )
        if self.degree * peers % 2:
            raise RequestError(
                f"topology {self}: {peers} workers cannot all have {self.degree} neighbors, as an edge has two ends: "
                f"ask for degree {self.degree - 1 or 2}, or for {peers + 1} workers"
            )
        if self.degree == 1 and peers > 2:
            raise RequestError(f"topology {self}: pairs fall apart: ask for a degree of at least 2")


@cache
def _drawn(peers: int, degree: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Draw until the graph is in one piece; dense graphs by drawing what they lack, which gets stuck less often."""
    random = Random(f"random regular {peers} {degree} {seed}")
    lacks = 2 * degree > peers - 1
    while True:
        edges = _paired(peers, peers - 1 - degree if lacks else degree, random)
        linked: list[set[int]] = [set() for _ in range(peers)]
        for one, other in edges:
            linked[one].add(other)
            linked[other].add(one)
        if lacks:
            linked = [{*range(peers)} - others - {peer} for peer, others in enumerate(linked)]
        around = tuple(tuple(sorted(others)) for others in linked)
        if unreached(peers, around.__getitem__) is None:
            return around


def _paired(peers: int, degree: int, random: Random) -> set[tuple[int, int]]:
    """Pair all ends; restart where the remaining ones cannot be paired."""
    edges: set[tuple[int, int]] = set()
    ends = [peer for peer in range(peers) for _ in range(degree)]
    while ends:
        random.shuffle(ends)
        left: list[int] = []
        for pair in zip(ends[::2], ends[1::2], strict=True):
            edge = (min(pair), max(pair))
            if edge[0] == edge[1] or edge in edges:
                left += pair
            else:
                edges.add(edge)
        if left and all(pair in edges for pair in combinations(sorted(set(left)), 2)):
            edges.clear()
            left = [peer for peer in range(peers) for _ in range(degree)]
        ends = left
    return edges

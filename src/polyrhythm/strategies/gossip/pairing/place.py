"""Places: who averages with whom, and who of the two asks.

Workers are coloured so that every pair has one of each colour: active ones ask, passive ones answer. A topology's edges
between workers of one colour are left out. Colours alternate by the workers' numbers; where what is left would fall
apart, they alternate with the distance from worker 0, which keeps every shortest path to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from polyrhythm.strategies.graph import unreached
from polyrhythm.strategies.topology import Topology


@dataclass(frozen=True)
class Place:
    """One worker's place among all.

    Attributes:
        rank: its own.
        workers: ranks of all; the first one, worker 0, is passive and lets the others in and out.
        partners: ranks of those that it averages with, in ascending order.
        active: whether it asks; else it answers.
    """

    rank: int
    workers: tuple[int, ...]
    partners: tuple[int, ...]
    active: bool

    @property
    def leads(self) -> bool:
        """Whether it is worker 0."""
        return self.rank == self.workers[0]

    @property
    def others(self) -> tuple[int, ...]:
        """Ranks of all others."""
        return tuple(rank for rank in self.workers if rank != self.rank)

    def partner(self, step: int, absent: set[int]) -> int | None:
        """Draws whom to ask at a step, of those who are there; the same whenever it is drawn again."""
        there = [rank for rank in self.partners if rank not in absent]
        return Random(f"{self.rank} asks at step {step}").choice(there) if there else None


def place_of(topology: Topology, workers: Sequence[int], index: int) -> Place:
    """Gives the place of a worker.

    Args:
        topology: of the workers; over all turns of its schedule, whichever way its edges lead.
        workers: their ranks.
        index: of the worker.
    """
    colours = _colours(topology, len(workers))
    near = [other for other in _around(topology, len(workers))[index] if colours[other] != colours[index]]
    return Place(
        workers[index], tuple(workers), tuple(workers[other] for other in near), bool(colours[index])
    )


@cache
def _around(topology: Topology, peers: int) -> tuple[tuple[int, ...], ...]:
    around: list[set[int]] = [set() for _ in range(peers)]
    for turn in range(topology.period(peers)):
        for peer in range(peers):
            for to in topology.targets(peer, peers, turn):
                around[peer].add(to)
                around[to].add(peer)
    return tuple(tuple(sorted(others)) for others in around)


@cache
def _colours(topology: Topology, peers: int) -> tuple[int, ...]:
    """Gives 1 for active and 0 for passive workers."""
    around = _around(topology, peers)
    alternating = tuple(peer % 2 for peer in range(peers))

    def of_the_other_colour(peer: int) -> list[int]:
        return [other for other in around[peer] if alternating[other] != alternating[peer]]

    if unreached(peers, of_the_other_colour) is None:
        return alternating
    distance = {0: 0}
    waiting = [0]
    for peer in waiting:  # grows while it is walked through
        for other in around[peer]:
            if other not in distance:
                distance[other] = distance[peer] + 1
                waiting.append(other)
    return tuple(distance[peer] % 2 for peer in range(peers))

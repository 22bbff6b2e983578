"""Max-min fair rates by progressive filling.

Bertsekas, Gallager, "Data Networks", 2nd edition 1992, section 6.5.2.

    All rates rise together; when a link is full, what crosses it keeps its rate and the rest goes on rising.

A bundle is some flows that cross the same contended links and so get the same rate each. Bundles with a limit of
their own stop rising there. One pass costs O(b log b) for b crossings of links by bundles.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any


@dataclass(frozen=True)
class Demand:
    """What a bundle asks for.

    Attributes:
        links: keys of the links that all of its flows cross.
        flows: how many there are.
        limit: the most that each may get, in bytes/s.
    """

    links: tuple[Hashable, ...]
    flows: int
    limit: float = inf


def fair_rates(capacities: Mapping[Any, float], demands: Mapping[int, Demand]) -> dict[int, float]:
    """Gives the rate of a flow of every bundle, in bytes/s.

    Args:
        capacities: of each link, in bytes/s.
        demands: bundles by key; each crosses a link or has a limit.
    """
    return _Filling(capacities, demands).rates()


class _Filling:
    def __init__(self, capacities: Mapping[Any, float], demands: Mapping[int, Demand]) -> None:
        self._demands = demands
        self._left: dict[Hashable, float] = {}
        self._rising: dict[Hashable, int] = {}
        self._across: dict[Hashable, list[int]] = {}
        self._rates: dict[int, float] = {}
        for key, demand in demands.items():
            for link in demand.links:
                self._left.setdefault(link, capacities[link])
                self._rising[link] = self._rising.get(link, 0) + demand.flows
                self._across.setdefault(link, []).append(key)

    def rates(self) -> dict[int, float]:
        # A heap entry is a level at which something stops rising: the position breaks ties, always the same way.
        links = list(self._left)
        heap = [(self._share(link), position, True) for position, link in enumerate(links)]
        heap += [(demand.limit, key, False) for key, demand in self._demands.items() if demand.limit < inf]
        heapq.heapify(heap)
        while heap:
            level, number, is_link = heapq.heappop(heap)
            if not is_link:
                self._stop(number, level)
                continue
            link = links[number]
            share = self._share(link)
            if share > level:  # others have stopped below their share since; it fills up later
                heapq.heappush(heap, (share, number, True))
                continue
            for key in self._across[link]:
                self._stop(key, level)
        return self._rates

    def _share(self, link: Hashable) -> float:
        rising = self._rising[link]
        return self._left[link] / rising if rising else inf

    def _stop(self, key: int, level: float) -> None:
        if key in self._rates:
            return
        self._rates[key] = level
        demand = self._demands[key]
        for link in demand.links:
            self._rising[link] -= demand.flows
            self._left[link] = max(0.0, self._left[link] - level * demand.flows)

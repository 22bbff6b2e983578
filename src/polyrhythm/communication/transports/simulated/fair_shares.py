"""Max-min fair rates by progressive filling.

Bertsekas, Gallager, "Data Networks", 2nd edition 1992, section 6.5.2.

    All rates rise together; when a link is full, what crosses it keeps its rate and the rest goes on rising.

A bundle is some flows that cross the same contended links and so get the same rate each. Bundles with a limit of
their own stop rising there. One pass costs O(b log b) for b crossings of links by bundles.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, NamedTuple


class Demand(NamedTuple):
    """What a bundle asks for.

    Attributes:
        links: keys of the links that all of its flows cross.
        flows: how many there are, at least one.
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
    across, rising = _crossings(demands)
    left = {link: capacities[link] for link in across}
    # A heap entry is a level at which something stops rising: the position breaks ties, always the same way.
    crossed = list(across)
    heap = [(left[link] / rising[link], position, True) for position, link in enumerate(crossed)]
    heap += [(demand.limit, key, False) for key, demand in demands.items() if demand.limit < inf]
    heapify(heap)
    rates: dict[int, float] = {}
    while len(rates) < len(demands):
        level, number, is_link = heappop(heap)
        link, stopping = None, [number]
        if is_link:
            link = crossed[number]
            if not rising[link]:
                continue
            share = left[link] / rising[link]
            if share > level:  # others have stopped below their share since; it fills up later
                heappush(heap, (share, number, True))
                continue
            stopping = across[link]
        for key in stopping:
            if key in rates:
                continue
            rates[key] = level
            links, flows, _ = demands[key]
            for other in links:
                if other is not link:  # which is full, and not asked again
                    rising[other] -= flows
                    rest = left[other] - level * flows
                    left[other] = rest if rest > 0 else 0.0
    return rates


def _crossings(demands: Mapping[int, Demand]) -> tuple[dict[Any, list[int]], dict[Any, int]]:
    """Gives the bundles that cross each link, by key, and how many flows that are; the first one's links first."""
    across: dict[Any, list[int]] = {}
    flows_across: dict[Any, int] = {}
    for key, (links, flows, _) in demands.items():
        for link in links:
            if link in across:
                across[link].append(key)
                flows_across[link] += flows
            else:
                across[link] = [key]
                flows_across[link] = flows
    return across, flows_across

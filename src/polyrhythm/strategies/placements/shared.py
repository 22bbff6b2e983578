"""Shared: servers run on the workers' hosts, spread evenly, as in BSC's 8 workers and 7 servers on 8 nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from polyrhythm.strategies.role_assignment import Placement


class Shared(Placement):
    """Servers share hosts and cores with workers."""

    dedicated: ClassVar[bool] = False

    def servers(self, hosts: Sequence[int], count: int) -> tuple[int, ...]:
        """Return the last rank of every host in turn, from the last host backwards."""
        ranks_of: dict[int, list[int]] = {}
        for rank, host in enumerate(hosts):
            if rank > 0:
                ranks_of.setdefault(host, []).append(rank)
        taken: list[int] = []
        while len(taken) < count:
            for host in sorted(ranks_of, reverse=True):
                if ranks_of[host] and len(taken) < count:
                    taken.append(ranks_of[host].pop())
        return tuple(sorted(taken))

"""Shared: servers run on the workers' hosts, spread evenly, as in BSC's 8 workers and 7 servers on 8 nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from polyrhythm.strategies.role_assignment import Placement


class Shared(Placement):
    """Servers share hosts and cores with workers."""

    dedicated: ClassVar[bool] = False

    def servers(self, hosts: Sequence[int], count: int, first: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the last rank of every host in turn: of those in `first`, then from the last host backwards.

        A host keeps a worker beside its servers for as long as another one has a rank to give.
        """
        left: dict[int, list[int]] = {host: [] for host in (*first, *sorted(set(hosts), reverse=True))}
        for rank, host in enumerate(hosts):
            if rank > 0:
                left[host].append(rank)
        home, taken = hosts[0], list[int]()
        while len(taken) < count:
            giving = [host for host, ranks in left.items() if len(ranks) > (host != home)]
            giving = giving or [host for host, ranks in left.items() if ranks]
            for host in giving[: count - len(taken)]:
                taken.append(left[host].pop())
        return tuple(sorted(taken))

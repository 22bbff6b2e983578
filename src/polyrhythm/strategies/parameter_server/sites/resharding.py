"""Sites with another number of workers in each: what a site holds, and has not sent yet, stays with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from polyrhythm.strategies.resharding import Held, Merged


class OfSites:
    """See `Resharding`.

    Args:
        before: the indices of each site's workers.
        after: the same, of those that there are now; as many sites have workers.
        servers: of each site.
    """

    def __init__(
        self, before: Sequence[tuple[int, ...]], after: Sequence[tuple[int, ...]], servers: int
    ) -> None:
        self._before = before
        self._after = after
        self._servers = servers

    def counted(self, held: Held) -> list[int]:
        """Those whose gradients their site has."""
        found = list(held.steps)
        for site, members in enumerate(self._before):
            states = held.servers[site * self._servers : (site + 1) * self._servers]
            for number, worker in enumerate(members):
                found[worker] = max(facts["steps"][number] for _, facts in states)
        return found

    def merged(self, held: Held, workers: int, step: int) -> Merged:
        """Sites go on as they are, with other workers."""
        servers = [
            (
                tensors,
                facts | {"steps": [step] * len(self._after[number // self._servers])} if facts else facts,
            )
            for number, (tensors, facts) in enumerate(held.servers)
        ]
        text = "the sites go on with their parameters, optimisers, and what they owe each other"
        return Merged(replace(held, workers={}, servers=servers), text)

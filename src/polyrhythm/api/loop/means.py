"""Means over the workers of a loop, by way of the store: so no worker is needed for them that might be lost.

worker  ── its part ──▶ store ◀── its part ── worker       whoever first finds the parts of all who are there
                        sum ◀── the first to have all ──   leaves their sum for all: every worker has the same
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

from polyrhythm.api.loop.bulletin import Bulletin
from polyrhythm.launch.script.places import Place, Places


class Means:
    """Takes part in means for one worker.

    Args:
        worker: its index.
        bulletin: where parts and sums are left.
        places: of the workers; who is lost, or behind the others, is not waited for.
        awaited: gives the workers that have a share of what is under way.
    """

    def __init__(
        self, worker: int, bulletin: Bulletin, places: Places, awaited: Callable[[], Collection[int]]
    ) -> None:
        self._worker = worker
        self._bulletin = bulletin
        self._places = places
        self._awaited = awaited

    def mean(self, number: int, value: float, weight: float) -> float:
        """Gives the weighted mean of what the workers bring, in their order; waits for all who are there.

        Args:
            number: of the mean, from 0; one that is over is given again.
            value: of this worker.
            weight: how much it counts.
        """
        own = json.dumps([value * weight, weight])  # doubles come back with all their bits
        self._bulletin.post(_part_key(number, self._worker), own)
        told = self._bulletin.await_found(lambda: self._sum(number), "the others to come to group.average")
        total, weights = json.loads(told)
        return float(total / weights)

    def _sum(self, number: int) -> str | None:
        key = f"script/mean/{number}"
        if (told := self._bulletin.read(key)) is not None:
            return told
        here = {worker for worker, place in enumerate(self._places.read()) if place is Place.HERE}
        awaited = sorted(here.intersection(self._awaited()) | {self._worker})
        parts = self._bulletin.read_all([_part_key(number, worker) for worker in awaited])
        if parts is None:
            return None
        pairs = [json.loads(part) for part in parts]
        return self._bulletin.post_if_absent(
            key, json.dumps([sum(column) for column in zip(*pairs, strict=True)])
        )


def _part_key(number: int, worker: int) -> str:
    return f"script/mean/{number}/{worker}"

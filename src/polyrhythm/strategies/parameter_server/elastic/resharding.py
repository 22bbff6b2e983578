"""Elastic averaging with another number of workers: the centre stays, and who is new begins there."""

from __future__ import annotations

from dataclasses import replace

from polyrhythm.strategies.resharding import Held, Merged


class OfCentre:
    """See `Resharding`.

    Args:
        after: how many workers there are.
    """

    def __init__(self, after: int) -> None:
        self._after = after

    def counted(self, held: Held) -> list[int]:
        """All of who stays and has its parameters; of others, those that the centre has heard of."""
        stay = self._staying(held)
        return [
            held.steps[worker] if worker in stay else heard for worker, heard in enumerate(_heard_of(held))
        ]

    def merged(self, held: Held, workers: int, step: int) -> Merged:
        """Who stays keeps its parameters and its optimiser."""
        servers = [(tensors, facts | {"steps": [step] * workers}) for tensors, facts in held.servers]
        own = {worker: held.workers[worker] for worker in self._staying(held)}
        text = f"the centre stays, and {len(own)} workers keep their own parameters and optimisers"
        if workers > len(own):
            text += f"; {workers - len(own)} begin at the centre, without momentum"
        return Merged(replace(held, workers=own, servers=servers), text)

    def _staying(self, held: Held) -> list[int]:
        """A state that is older than its worker's last exchange is of no use, as at any resumption."""
        return [
            worker
            for worker, heard in enumerate(_heard_of(held)[: self._after])
            if worker in held.workers and held.steps[worker] >= heard
        ]


def _heard_of(held: Held) -> list[int]:
    """Gives how many steps of each worker the centre has heard of."""
    return [max(column) for column in zip(*(facts["steps"] for _, facts in held.servers), strict=True)]

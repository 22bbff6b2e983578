"""Elastic averaging with another number of workers: the centre stays, and who is new begins there."""

from __future__ import annotations

from dataclasses import replace

from polyrhythm.strategies.parameter_server.serving.server_steps import all_at, steps_known
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
            held.steps[worker] if worker in stay else max(heard)
            for worker, heard in enumerate(steps_known(held.servers))
        ]

    def merged(self, held: Held, workers: int, step: int) -> Merged:
        """Who stays keeps its parameters and its optimiser."""
        servers = all_at(held.servers, workers, step)
        own = {worker: held.workers[worker] for worker in self._staying(held)}
        text = f"the centre stays, and {len(own)} workers keep their own parameters and optimisers"
        if workers > len(own):
            text += f"; {workers - len(own)} begin at the centre, without momentum"
        return Merged(replace(held, workers=own, servers=servers), text)

    def _staying(self, held: Held) -> list[int]:
        """A state that is older than its worker's last exchange is of no use, as at any resumption."""
        return [
            worker
            for worker, heard in enumerate(steps_known(held.servers)[: self._after])
            if worker in held.workers and held.steps[worker] >= max(heard)
        ]

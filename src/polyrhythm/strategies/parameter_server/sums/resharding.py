"""Downpour with another number of workers: who stays keeps its sum, and others begin with the servers' parameters."""

from __future__ import annotations

from dataclasses import replace

from polyrhythm.strategies.parameter_server.serving.server_steps import all_at, steps_known
from polyrhythm.strategies.resharding import Held, Merged


class OfSums:
    """See `Resharding`.

    Args:
        after: how many workers there are.
    """

    def __init__(self, after: int) -> None:
        self._after = after

    def counted(self, held: Held) -> list[int]:
        """All of who stays and has what it had not pushed; of others, those that servers have."""
        stay = self._staying(held)
        return [
            held.steps[worker] if worker in stay else max(known)
            for worker, known in enumerate(steps_known(held.servers))
        ]

    def merged(self, held: Held, workers: int, step: int) -> Merged:
        """Who stays keeps its parameters and its sum, which servers have up to the step that all begin with."""
        servers = all_at(held.servers, workers, step)
        own = {
            worker: (tensors, facts | {"pushed": step})
            for worker, (tensors, facts) in held.workers.items()
            if worker in self._staying(held)
        }
        text = (
            "the servers go on with their parameters and optimisers, and "
            f"{len(own)} workers with their own parameters and sums"
        )
        if workers > len(own):
            text += f"; {workers - len(own)} begin with the servers' parameters"
        return Merged(replace(held, workers=own, servers=servers), text)

    def _staying(self, held: Held) -> list[int]:
        """What a worker had not pushed fits what servers have, or is of no use, as at any resumption."""
        known = steps_known(held.servers)[: self._after]
        pushed = {worker: facts.get("pushed") for worker, (_, facts) in held.workers.items()}
        return [worker for worker, steps in enumerate(known) if pushed.get(worker) == min(steps)]

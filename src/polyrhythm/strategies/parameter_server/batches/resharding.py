"""Batches with another number of workers: a batch that was under way is dealt out again, and the curvature stays."""

from __future__ import annotations

from dataclasses import replace

from polyrhythm.strategies.parameter_server.serving.server_steps import all_at, steps_known
from polyrhythm.strategies.resharding import Held, Merged


class OfBatches:
    """See `Resharding`."""

    def counted(self, held: Held) -> list[int]:
        """Those of the batches that the servers have."""
        return [max(known) for known in steps_known(held.servers)]

    def merged(self, held: Held, workers: int, step: int) -> Merged:
        """Everybody begins with the servers' parameters."""
        servers = all_at(held.servers, workers, step)
        text = "the servers go on with their parameters and what they know of the curvature"
        return Merged(replace(held, workers={}, servers=servers), f"{text}; a batch under way is left out")

"""Batches with another number of workers: a batch that was under way is dealt out again, and the curvature stays."""

from __future__ import annotations

from dataclasses import replace

from polyrhythm.strategies.resharding import Held, Merged


class OfBatches:
    """See `Resharding`."""

    def counted(self, held: Held) -> list[int]:
        """Those of the batches that the servers have."""
        return [max(column) for column in zip(*(facts["steps"] for _, facts in held.servers), strict=True)]

    def merged(self, held: Held, workers: int, step: int) -> Merged:
        """Everybody begins with the servers' parameters."""
        servers = [(tensors, facts | {"steps": [step] * workers}) for tensors, facts in held.servers]
        text = "the servers go on with their parameters and what they know of the curvature"
        return Merged(replace(held, workers={}, servers=servers), f"{text}; a batch under way is left out")

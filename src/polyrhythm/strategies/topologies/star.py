"""Star: everybody talks to worker 0."""

from __future__ import annotations

from collections.abc import Sequence

from polyrhythm.strategies.topology import Topology


class Star(Topology):
    """Worker 0 talks to all others, who talk to nobody else."""

    def targets(self, peer: int, peers: int, turn: int = 0) -> Sequence[int]:
        return (0,) if peer else range(1, peers)

    def check(self, peers: int) -> None:
        """Accept any number."""

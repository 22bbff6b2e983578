"""Star: every worker is connected with rank 0."""

from __future__ import annotations

from collections.abc import Sequence

from polyrhythm.strategies.topology import Topology


class Star(Topology):
    """Rank 0 is connected with all others, which have no other neighbor."""

    def targets(self, peer: int, peers: int, turn: int = 0) -> Sequence[int]:
        return (0,) if peer else range(1, peers)

    def check(self, peers: int) -> None:
        """Accept any number."""

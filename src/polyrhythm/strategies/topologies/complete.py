"""Complete: every worker is connected with every other."""

from __future__ import annotations

from collections.abc import Sequence

from polyrhythm.strategies.topology import Circulant


class Complete(Circulant):
    """One turn gives every worker the mean; rho = 0, and N - 1 messages a worker."""

    def offsets(self, peers: int, turn: int = 0) -> Sequence[int]:
        return range(1, peers)

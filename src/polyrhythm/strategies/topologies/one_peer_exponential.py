"""One-peer exponential graph: the exponential graph's edges, one of them a turn.

Assran, Loizou, Ballas, Rabbat, "Stochastic gradient push for distributed deep learning", ICML 2019, arXiv 1811.10792;
for the exact mean, Ying et al., NeurIPS 2021, arXiv 2110.13363.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyrhythm.strategies.topology import Circulant


class OnePeerExponential(Circulant):
    """In turn k worker i sends half to i + 2^k; after log2 N turns all hold the exact mean, N a power of two."""

    def period(self, peers: int) -> int:
        """The powers of two below the number of peers."""
        return max(1, (peers - 1).bit_length())

    def offsets(self, peers: int, turn: int = 0) -> Sequence[int]:
        return [1 << (turn % self.period(peers))] if peers > 1 else ()

"""Static exponential graph.

Ying, Yuan, Chen, Hu, Pan, Yin, "Exponential graph is provably efficient for decentralized deep training", NeurIPS
2021, arXiv 2110.13363.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyrhythm.strategies.topology import Circulant


class Exponential(Circulant):
    """Worker i sends to i + 1, i + 2, i + 4, …; rho = 1 - 2/(1 + log2 N) for N a power of two."""

    def offsets(self, peers: int, turn: int = 0) -> Sequence[int]:
        return [1 << power for power in range((peers - 1).bit_length())]

"""Krum: the one gradient that is nearest to its neighbors.

Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NIPS
2017, arXiv 1703.02757.

    score(i) = sum over the n - f - 2 nearest j != i of ||g_i - g_j||^2        the g_i of least score is applied

f = `f`, of n >= 2f + 3 gradients. Distances are those of whole gradients: several servers add up the parts of their
shards. A gradient that is not finite is infinitely far from all others. Of equal scores, the first gradient's counts,
as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from polyrhythm.strategies.aggregator import ByDistance


class Krum(ByDistance):
    """One gradient, chosen by its neighbors."""

    def aggregate(
        self, gradients: Sequence[Tensor], weights: Sequence[float], distances: Tensor | None
    ) -> Tensor:
        return gradients[self.order(distances, range(len(gradients)))[0]]

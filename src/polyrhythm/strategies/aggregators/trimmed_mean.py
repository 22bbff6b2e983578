"""Coordinate-wise trimmed mean.

Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018,
arXiv 1803.01498.

    g_k = mean of g_{i,k} without the k largest and the k smallest

k = `k`, at least as many as may be wrong, of more than 2k gradients. With k = 0 it is the mean, in which each gradient
counts the same. A number that is not finite counts as the largest. As in the paper, k of the smallest are dropped even
if all wrong numbers are large.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor

from polyrhythm.strategies.aggregator import Aggregator, in_order, mean


class TrimmedMean(Aggregator):
    """The mean without the extremes, for each parameter.

    Attributes:
        k: number of gradients left out on either side.
    """

    k: int = Field(default=1, ge=0)

    @property
    def least(self) -> int:
        return 2 * self.k + 1

    @property
    def strength(self) -> str:
        return "k"

    def aggregate(
        self, gradients: Sequence[Tensor], weights: Sequence[float], distances: Tensor | None
    ) -> Tensor:
        if self.k == 0:
            return mean(gradients)
        kept = in_order(gradients)[self.k : len(gradients) - self.k]
        return mean(list(kept))

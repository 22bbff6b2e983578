"""Coordinate-wise median.

Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018,
arXiv 1803.01498.

    g_k = median_i g_{i,k}        for an even number of gradients, the mean of the two in the middle

f = `f`, of at least 2f + 1 gradients. A number that is not finite counts as the largest.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor

from polyrhythm.strategies.aggregator import Aggregator, in_order, middle


class CoordinateMedian(Aggregator):
    """The number in the middle, for each parameter.

    Attributes:
        f: number of gradients that may be wrong.
    """

    f: int = Field(default=1, ge=0)

    @property
    def least(self) -> int:
        return 2 * self.f + 1

    def aggregate(
        self, gradients: Sequence[Tensor], weights: Sequence[float], distances: Tensor | None
    ) -> Tensor:
        return middle(in_order(gradients))

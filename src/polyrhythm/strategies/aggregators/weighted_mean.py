"""Weighted mean: every sample counts the same. A single wrong gradient can turn it into anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from polyrhythm.strategies.aggregator import Aggregator, mean


class WeightedMean(Aggregator):
    """The mean over all samples."""

    robust: ClassVar[bool] = False

    @property
    def least(self) -> int:
        return 1

    def aggregate(
        self, gradients: Sequence[Tensor], weights: Sequence[float], distances: Tensor | None
    ) -> Tensor:
        return mean(gradients, weights)

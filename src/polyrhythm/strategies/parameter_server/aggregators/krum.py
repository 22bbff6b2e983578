"""Krum: the one gradient that is nearest to its neighbours.

Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NIPS
2017, arXiv 1703.02757.

    score(i) = sum over the n - f - 2 nearest j != i of ||g_i - g_j||^2        the g_i of least score is applied

f = f, of n >= 2f + 3 gradients. Of equal scores, and equal sums over all others, the first one's is taken. Distances
are those of whole gradients: several servers add up the parts of their shards. A gradient that is not finite is
infinitely far from all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from polyrhythm.strategies.parameter_server.serving.aggregator import Aggregator
from polyrhythm.strategies.parameter_server.serving.krum_scores import krum_order


class Krum(Aggregator):
    """One gradient, chosen by its neighbours.

    Attributes:
        f: how many gradients may be wrong.
    """

    whole: ClassVar[bool] = True

    f: int = Field(default=1, ge=0)

    @property
    def least(self) -> int:
        """2f + 3."""
        return 2 * self.f + 3

    def aggregate(
        self, gradients: Sequence[Tensor], weights: Sequence[float], distances: Tensor | None
    ) -> Tensor:
        """Chooses one."""
        assert distances is not None, "the server has them made"
        return gradients[krum_order(distances, range(len(gradients)), self.f)[0]]

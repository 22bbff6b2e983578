"""Multi-Krum: the mean of the m gradients that are nearest to their neighbors.

Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NIPS
2017, arXiv 1703.02757.

    g = mean of the m gradients of least score        score as in Krum, 1 <= m <= n - f - 2

f = `f`, of n >= 2f + 3 gradients; m = `m`, by default as large as possible. With m = 1 it is Krum. Everything else is
as in `krum`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor

from polyrhythm.errors import RequestError
from polyrhythm.strategies.aggregator import ByDistance, mean


class MultiKrum(ByDistance):
    """The mean of several gradients, chosen by their neighbors.

    Attributes:
        m: number of chosen gradients; default: all but f + 2.
    """

    m: int | None = Field(default=None, ge=1)

    @property
    def least(self) -> int:
        return max(super().least, (self.m or 1) + self.f + 2)

    def check(self, gradients: int) -> None:
        if self.m is not None and gradients >= 2 * self.f + 3 and self.m > gradients - self.f - 2:
            raise RequestError(
                f"{self}: m is {self.m}, but of {gradients} gradients at most {gradients - self.f - 2} may be chosen "
                "(n - f - 2): ask for a smaller m, or leave it out"
            )
        super().check(gradients)

    def aggregate(
        self, gradients: Sequence[Tensor], weights: Sequence[float], distances: Tensor | None
    ) -> Tensor:
        count = self.m or len(gradients) - self.f - 2
        chosen = sorted(self.order(distances, range(len(gradients)))[:count])
        return mean([gradients[position] for position in chosen])

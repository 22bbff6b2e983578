"""What all aggregators have in common that compare whole gradients by their distances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from polyrhythm.strategies.parameter_server.rules.aggregator import Aggregator
from polyrhythm.strategies.parameter_server.rules.krum_scores import krum_order


class ByDistance(Aggregator):
    """Gradients are chosen by how near they are to others.

    Attributes:
        f: how many gradients may be wrong.
    """

    whole: ClassVar[bool] = True

    f: int = Field(default=1, ge=0)

    @property
    def least(self) -> int:
        """2f + 3, as Krum needs."""
        return 2 * self.f + 3

    def order(self, distances: Tensor | None, among: Sequence[int]) -> list[int]:
        """Orders gradients by Krum's score, the best first.

        Args:
            distances: as `aggregate` gets them.
            among: positions of those that take part.
        """
        assert distances is not None, "the server has them made"
        return krum_order(distances, among, self.f)

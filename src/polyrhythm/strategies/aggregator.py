"""Aggregators: how several gradients become the one that is applied, and what several of them share.

- `mean`: the weighted mean.
- `in_order` and `middle`: gradients sorted number by number, with what is not finite at the end; their
  median.
- `squared_distances` and `krum_order`: Krum's scores, how far a gradient is from those that are nearest to
  it.
- `ByDistance`: what all aggregators have in common that compare whole gradients by their distances.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from math import inf
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polyrhythm.errors import RequestError
from polyrhythm.specs import Config

AGGREGATORS = "polyrhythm.strategies.aggregators"


class Aggregator(Config):
    """An aggregator's configuration, and its rule.

    Attributes:
        robust: whether it tolerates arbitrarily wrong gradients. Then every gradient has one vote, since
            weights are set by their senders.
        whole: whether it needs the distances between whole gradients, which servers then add up over their shards.
    """

    robust: ClassVar[bool] = True
    whole: ClassVar[bool] = False

    @property
    @abstractmethod
    def least(self) -> int:
        """Least number of gradients; with fewer, no update is made."""

    def check(self, gradients: int) -> None:
        """Raise `RequestError` where updates are made of too few gradients."""
        if gradients < self.least:
            raise RequestError(
                f"{self} needs at least {self.least} gradients an update, and there are {gradients}: ask for "
                f"{self.least} synchronous workers, or for a smaller {self.strength}"
            )

    def spares(self, gradients: int) -> int:
        """Return how many of an update's gradients may be missing: all, if it need not choose."""
        return max(0, gradients - self.least) if self.robust else gradients

    @property
    def strength(self) -> str:
        """Key of the number of wrong gradients that it tolerates."""
        return "f"

    @abstractmethod
    def aggregate(
        self, gradients: Sequence[Tensor], weights: Sequence[float], distances: Tensor | None
    ) -> Tensor:
        """Make one gradient of several.

        Args:
            gradients: gradients of the pushers, each `(n,)`, a shard's part, in their order; not changed.
            weights: samples behind each.
            distances: `(k, k)`, float64, squared distances between the whole gradients, where they are needed; not a
                number on the diagonal where a gradient is not finite.

        Returns:
            `(n,)`.
        """


def mean(gradients: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    """Return the weighted mean, `(n,)`, summed in order; what weighs nothing is not looked at. Default: all alike."""
    if len(gradients) == 1:
        return gradients[0]
    total = torch.zeros_like(gradients[0])
    weight = total.new_zeros(())  # in the gradients' dtype, where an all-reduce adds the weights up as well
    for gradient, own in zip(gradients, weights or [1.0] * len(gradients), strict=True):
        weight.add_(own)
        if own == 1.0:
            total.add_(gradient)
        elif own > 0:
            total.add_(gradient * own)
    return total.div_(weight)


def in_order(gradients: Sequence[Tensor]) -> Tensor:
    """Sort every coordinate of k gradients by itself, `(k, n)`; what is not finite counts as infinitely large."""
    stacked = torch.stack(list(gradients))
    return torch.where(stacked.isfinite(), stacked, torch.inf).sort(dim=0).values


def middle(ordered: Tensor) -> Tensor:
    """Return the median of ascending `(k, n)`, `(n,)`: of an even count, the mean of the two in the middle."""
    upper = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[upper]
    return torch.add(ordered[upper - 1], ordered[upper]).div_(2)


def squared_distances(gradients: Sequence[Tensor]) -> Tensor:
    """Return a shard's part of the squared distances, `(k, k)`, float64; parts of several shards may be added.

    The diagonal is 0, or not a number where a gradient is not finite.
    """
    found = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for row, one in enumerate(gradients):
        for column, other in enumerate(gradients[: row + 1]):
            found[row, column] = found[column, row] = (one - other).square_().sum(dtype=torch.float64).cpu()
    return found


def krum_order(distances: Tensor, among: Sequence[int], f: int, *, by_all: bool = False) -> list[int]:
    """Order gradients by their score, the sum of squared distances to the `len(among) - f - 2` nearest others.

    Args:
        distances: `(k, k)`, as `squared_distances` returns them.
        among: positions of the gradients that take part.
        f: number of gradients that may be wrong.
        by_all: whether, of equal scores, the gradient that is nearer to all others is first.

    Returns:
        The positions, the least score first; of equal scores, the lowest position. Gradients that are not finite are
        last, and infinitely far from all others.
    """
    neighbors = max(0, len(among) - f - 2)
    finite = torch.nan_to_num(distances, nan=inf, posinf=inf)

    def score(one: int) -> tuple[float, float, int]:
        if not torch.isfinite(distances[one, one]):
            return inf, inf, one
        away = sorted(float(finite[one, other]) for other in among if other != one)
        return sum(away[:neighbors]), sum(away) if by_all else 0.0, one

    return sorted(among, key=score)


class ByDistance(Aggregator):
    """Gradients are chosen by how near they are to others.

    Attributes:
        f: number of gradients that may be wrong.
    """

    whole: ClassVar[bool] = True

    f: int = Field(default=1, ge=0)

    @property
    def least(self) -> int:
        return 2 * self.f + 3

    def order(self, distances: Tensor | None, among: Sequence[int], *, by_all: bool = False) -> list[int]:
        """Order the positions `among` as `krum_order` does, the best first; `distances` as `aggregate` gets them."""
        assert distances is not None, "the server has them made"
        return krum_order(distances, among, self.f, by_all=by_all)

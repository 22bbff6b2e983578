"""Krum's scores: how far a gradient is from those that are nearest to it."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor


def squared_distances(gradients: Sequence[Tensor]) -> Tensor:
    """Gives a shard's part of the squared distances, `(k, k)`, float64; parts of several shards may be added.

    Args:
        gradients: k of them, each `(n,)`.

    Returns:
        Zero on the diagonal, or not a number where a gradient is not finite.
    """
    found = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for row, one in enumerate(gradients):
        for column, other in enumerate(gradients[: row + 1]):
            found[row, column] = found[column, row] = (one - other).square_().sum(dtype=torch.float64).cpu()
    return found


def krum_order(distances: Tensor, among: Sequence[int], f: int) -> list[int]:
    """Orders gradients by their score, the sum of squared distances to the `len(among) - f - 2` nearest others.

    Args:
        distances: `(k, k)`, as `squared_distances` gives them.
        among: positions of the gradients that take part.
        f: how many may be wrong.

    Returns:
        The positions, the least score first; of equal scores (as the last choices of Bulyan have them), the one that is
        nearer to all, and of those the lowest position. Gradients that are not finite are
        last, and infinitely far from all others.
    """
    neighbours = max(0, len(among) - f - 2)
    finite = torch.nan_to_num(distances, nan=inf, posinf=inf)

    def score(one: int) -> tuple[float, float, int]:
        if not torch.isfinite(distances[one, one]):
            return inf, inf, one
        away = sorted(float(finite[one, other]) for other in among if other != one)
        return sum(away[:neighbours]), sum(away), one

    return sorted(among, key=score)

"""Bulyan: gradients are chosen by repeated Krum, and averaged near their median.

El Mhamdi, Guerraoui, Rouault, "The Hidden Vulnerability of Distributed Learning in Byzantium", ICML 2018,
arXiv 1802.07927.

    S = n - 2f gradients, each the Krum choice among the remaining ones
    g_k = mean of the n - 4f numbers of {g_{i,k} : i in S} that are nearest to their median

f = `f`, of n >= 4f + 3 gradients. Of equal scores, the gradient that is nearer to all remaining ones is
chosen. The paper leaves that open, and it is no rare case: among the last f + 3 gradients only one neighbor
counts, so that every nearest pair has one score, and with fewer none does. By position, as in Krum, the
result would depend on the workers' order, and one of f wrong gradients could be chosen for its position. Of
numbers that are equally near, the smaller one is taken. Numbers that are not finite are never near.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyrhythm.strategies.aggregator import ByDistance, in_order, middle


class Bulyan(ByDistance):
    """Chosen by neighbors, then averaged near the median, for each parameter."""

    @property
    def least(self) -> int:
        return 4 * self.f + 3

    def aggregate(
        self, gradients: Sequence[Tensor], weights: Sequence[float], distances: Tensor | None
    ) -> Tensor:
        left, count = list(range(len(gradients))), len(gradients)
        chosen: list[int] = []
        while len(chosen) < count - 2 * self.f:
            chosen.append(self.order(distances, left, by_all=True)[0])
            left.remove(chosen[-1])
        ordered = in_order([gradients[position] for position in chosen])
        away = (ordered - middle(ordered)).abs()
        nearest = torch.where(away.isfinite(), away, torch.inf).sort(dim=0, stable=True).indices
        return ordered.gather(0, nearest[: count - 4 * self.f]).mean(dim=0)

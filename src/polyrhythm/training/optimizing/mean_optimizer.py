"""The mean of several optimisers' states, of one plan each: as if one had made the mean of their models.

per number (momenta, mean squares)      the weighted mean; zeros of who has none yet
else (Adam's step, a basis)             the first one's
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Packed = tuple[dict[str, Tensor], dict[str, Any]]


def mean_optimizer(packed: Sequence[Packed], weights: Sequence[float]) -> Packed:
    """Gives the mean of optimisers' states.

    Args:
        packed: what `pack_optimizer_state` gave of every one; at least one.
        weights: of each; they are not all 0.
    """
    fullest = max(packed, key=lambda entry: len(entry[0]))
    tensors = {}
    for name, like in fullest[0].items():
        found = [each.get(name) for each, _ in packed]
        first = next(value for value in found if value is not None)
        tensors[name] = (
            weighted_mean(found, weights, like) if _is_per_number(name, like, fullest[1]) else first
        )
    return tensors, fullest[1] if fullest[0] else packed[0][1]


def weighted_mean(values: Sequence[Tensor | None], weights: Sequence[float], like: Tensor) -> Tensor:
    """Gives the weighted mean of tensors like one of them; None counts as zeros."""
    total = torch.zeros_like(like)
    for value, weight in zip(values, weights, strict=True):
        if value is not None:
            total.add_(value, alpha=weight)
    return total.div_(sum(weights))


def _is_per_number(name: str, value: Tensor, facts: dict[str, Any]) -> bool:
    """Whether a tensor has a number for each number of a parameter."""
    if value.ndim == 0 or not value.is_floating_point():
        return False
    shapes = [shape for group in facts.get("shapes", []) for shape in group]
    return list(value.shape) in shapes

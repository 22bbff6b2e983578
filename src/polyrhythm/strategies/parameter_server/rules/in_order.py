"""Gradients in order, number by number, with what is not finite at the end; and their middle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def in_order(gradients: Sequence[Tensor]) -> Tensor:
    """Sorts every coordinate by itself.

    Args:
        gradients: k of them, each `(n,)`.

    Returns:
        `(k, n)`, ascending along the first dimension; whatever is not finite counts as infinitely large.
    """
    stacked = torch.stack(list(gradients))
    return torch.where(stacked.isfinite(), stacked, torch.inf).sort(dim=0).values


def middle(ordered: Tensor) -> Tensor:
    """Gives the median along the first dimension, `(n,)`: of an even count, the mean of the two in the middle.

    Args:
        ordered: `(k, n)`, ascending.
    """
    upper = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[upper]
    return torch.add(ordered[upper - 1], ordered[upper]).div_(2)

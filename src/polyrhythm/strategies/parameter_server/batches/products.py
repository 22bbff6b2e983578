"""Scalar products of vectors with each other, and the sums of their multiples that are made with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 14
"""Numbers of each vector at a time: few enough for a processor's cache."""


def gram_of(vectors: Sequence[Tensor], known: Sequence[int], products: Tensor) -> Tensor:
    """Gives all scalar products, added up in blocks, so that no copy of all vectors is made.

    Args:
        vectors: each `(n,)`.
        known: those of which the products with each other are known.
        products: `(len(known), len(known))`, float64, these.

    Returns:
        `(k, k)`, float64.
    """
    count = len(vectors)
    new = [number for number in range(count) if number not in known]
    rows = torch.zeros(len(new), count, dtype=torch.float64)
    for start in range(0, len(vectors[0]), _BLOCK):
        block = torch.stack([vector[start : start + _BLOCK] for vector in vectors]).double()
        rows += block[new] @ block.T
    total = torch.zeros(count, count, dtype=torch.float64)
    old = torch.tensor(known, dtype=torch.long)
    total[old[:, None], old] = products
    total[new, :] = rows
    total[:, new] = rows.T
    return total


def combined(vectors: Sequence[Tensor], shares: Tensor) -> Tensor:
    """Gives so much of each vector, `(n,)` in their dtype, added up in float64."""
    total = torch.zeros_like(vectors[0], dtype=torch.float64)
    for vector, share in zip(vectors, shares.tolist(), strict=True):
        if share != 0.0:
            total.add_(vector, alpha=share)
    return total.to(vectors[0].dtype)

"""The two-loop recursion of L-BFGS on coefficients: it needs the scalar products of its vectors and not the vectors.

Nocedal, "Updating quasi-Newton matrices with limited storage", Mathematics of Computation 35, 1980; on scalars: Chen,
Wang, Zhou, "Large-scale L-BFGS using MapReduce", NIPS 2014.

    q = g;  newest to oldest:  a_i = s_i'q / s_i'y_i,  q = q - a_i y_i
    r = (s_k'y_k / y_k'y_k) q, of the newest pair k
    oldest to newest:  r = r + s_i (a_i - y_i'r / s_i'y_i)

Every vector here is a combination of those that there were, so a scalar product with it is one of a row of the Gram
matrix with its coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Pair = tuple[int, int]


def two_loop(gram: Tensor, pairs: Sequence[Pair], gradient: int) -> Tensor:
    """Gives the gradient times the inverse Hessian's estimate.

    Args:
        gram: `(k, k)`, float64, the scalar products of all vectors with each other.
        pairs: which of them are s_i and y_i, the oldest pair first; s_i'y_i > 0.
        gradient: which of them is g.

    Returns:
        `(k,)`, float64: how much of each vector is in r.
    """
    found = torch.zeros(len(gram), dtype=gram.dtype)
    found[gradient] = 1.0
    shares: list[Tensor] = []
    for s, y in reversed(pairs):
        shares.append(gram[s] @ found / gram[s, y])
        found[y] -= shares[-1]
    if pairs:
        s, y = pairs[-1]
        found *= gram[s, y] / gram[y, y]
    for s, y in pairs:
        found[s] += shares.pop() - gram[y] @ found / gram[s, y]
    return found

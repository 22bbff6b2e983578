"""L-BFGS over shards: the two-loop recursion on coefficients, a line search on slopes, and one shard's pairs.

Nocedal, "Updating quasi-Newton matrices with limited storage", Mathematics of Computation 35, 1980; on
scalars: Chen, Wang, Zhou, "Large-scale L-BFGS using MapReduce", NIPS 2014.

    q = g;  newest to oldest:  a_i = s_i'q / s_i'y_i,  q = q - a_i y_i
    r = (s_k'y_k / y_k'y_k) q, of the newest pair k
    oldest to newest:  r = r + s_i (a_i - y_i'r / s_i'y_i)

Every vector here is a combination of those that there were, so a scalar product with it is one of a row of
the Gram matrix with its coefficients: the recursion needs the scalar products of its vectors and not the
vectors.

The line search knows slopes alone, and takes the point where the derivative along the line would be 0 if it
were straight:

    slope(t) = g(w + t s)'s                              the line is searched at t = 1
    t' = slope(0) / (slope(0) - slope(1))                exact where the loss is quadratic along the line

One shard holds its pieces of the pairs and of the line that is being searched:

    batch k      gradient at w_k        ─▶ a trial: the optimiser steps along r
    batch k + 1  gradient at the trial  ─▶ slopes: good enough, or a better multiple of the same step ─▶ …
    then         (s, y) = (w - w_k, g - g_k) is kept if s'y > 0, and the next direction begins here

All decisions follow from the Gram matrix, which is the sum of all shards' parts; so all servers decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

import torch
from torch import Tensor

from polyrhythm.strategies.parameter_server.serving.shard import OptimizedShard
from polyrhythm.strategies.state import State

SHORTEST, LONGEST = 0.1, 10.0
"""What a trial is multiplied by, at least and at most: slopes of different data may say anything."""


def correction(slope_before: float, slope: float, tolerance: float) -> float | None:
    """Says by what a trial step must be multiplied.

    Args:
        slope_before: along the line, where it begins.
        slope: where the trial has come.
        tolerance: what part of the slope may be left.

    Returns:
        The factor; None where the trial is good enough, or the line does not lead downhill.
    """
    usable = isfinite(slope_before) and isfinite(slope) and slope_before < 0
    if not usable or abs(slope) <= tolerance * -slope_before:
        return None
    if slope <= slope_before:  # it still gets steeper: the minimum is nowhere in sight
        return LONGEST
    return min(max(slope_before / (slope_before - slope), SHORTEST), LONGEST)


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


_LEAST_COSINE = 1e-8
"""Between s and y of a pair that is kept."""
_S, _Y, _LINE, _PRODUCTS = "pair.s.", "pair.y.", "line.", "pair.products"


@dataclass(frozen=True, kw_only=True)
class Search:
    """How directions are made and searched.

    Attributes:
        memory: pairs that are kept.
        trials: corrections of a step along its line, at most.
        tolerance: what part of the slope may be left when a line is over.
    """

    memory: int
    trials: int
    tolerance: float


class Curvature:
    """The pairs and the line of one shard.

    Args:
        shard: the parameters, and the optimiser that makes a direction a step.
        search: how.
    """

    def __init__(self, shard: OptimizedShard, search: Search) -> None:
        self._shard = shard
        self._search = search
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._begin: tuple[Tensor, Tensor] | None = None
        self._trials = 0
        self._vectors: list[Tensor] = []
        self._part = self._of_pairs = torch.zeros(0, 0, dtype=torch.float64)

    @property
    def pairs(self) -> int:
        """How many are kept."""
        return len(self._pairs)

    def products(self, gradient: Tensor) -> Tensor:
        """Takes a batch's gradient, where the parameters are now.

        Args:
            gradient: `(n,)`.

        Returns:
            `(k, k)`, float64, this shard's part of all scalar products, which `advance` needs the sum of.
        """
        steps, changes = [s for s, _ in self._pairs], [y for _, y in self._pairs]
        if self._begin is not None:
            steps.append(self._shard.values - self._begin[0])
            changes.append(gradient - self._begin[1])
        self._vectors = [*steps, *changes, gradient]
        count, old = len(steps), range(len(self._pairs))
        known = [*old, *(count + number for number in old)]
        self._part = gram_of(self._vectors, known, self._of_pairs)
        return self._part

    def advance(self, gram: Tensor, learning_rate: float) -> None:
        """Corrects the step along its line, or ends the line and takes a step along the next.

        Args:
            gram: the sum of what `products` gave on all shards.
            learning_rate: of a step along a new line.
        """
        vectors, self._vectors = self._vectors, []
        newest = len(vectors) // 2 - 1
        if self._begin is not None:
            slope = float(gram[newest, -1])
            factor = correction(slope - float(gram[newest, -2]), slope, self._search.tolerance)
            if factor is not None and self._trials < self._search.trials:
                self._trials += 1
                self._retry(vectors[newest], factor)
                return
        kept = self._kept(gram, newest)
        self._keep(vectors, kept)
        self._walk(vectors, gram, kept, learning_rate)

    def state(self) -> State:
        """Gives the pairs and the line."""
        tensors = {f"{_S}{number}": s for number, (s, _) in enumerate(self._pairs)}
        tensors |= {f"{_Y}{number}": y for number, (_, y) in enumerate(self._pairs)}
        if self._begin is not None:
            tensors |= {f"{_LINE}values": self._begin[0], f"{_LINE}gradient": self._begin[1]}
        tensors[_PRODUCTS] = self._of_pairs.flatten()
        return tensors, {"pairs": len(self._pairs), "trials": self._trials}

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""
        tensors, facts = state
        self._pairs = [
            (tensors[f"{_S}{number}"], tensors[f"{_Y}{number}"]) for number in range(facts["pairs"])
        ]
        if f"{_LINE}values" in tensors:
            self._begin = tensors[f"{_LINE}values"], tensors[f"{_LINE}gradient"]
        self._trials = facts["trials"]
        self._of_pairs = tensors[_PRODUCTS].reshape(2 * facts["pairs"], -1 if facts["pairs"] else 0)

    def _kept(self, gram: Tensor, newest: int) -> list[Pair]:
        """Says which vectors are pairs from now on, the oldest first."""
        count = len(gram) // 2
        pairs = [(number, count + number) for number in range(count)]
        if self._begin is not None:
            s, y = pairs[-1]
            if not float(gram[s, y]) > _LEAST_COSINE * sqrt(float(gram[s, s]) * float(gram[y, y])):
                pairs.pop()
        return pairs[max(0, len(pairs) - self._search.memory) :]

    def _keep(self, vectors: Sequence[Tensor], pairs: Sequence[Pair]) -> None:
        """Forgets all other pairs; the products of those that stay need not be made again."""
        self._pairs = [(vectors[s], vectors[y]) for s, y in pairs]
        order = [s for s, _ in pairs] + [y for _, y in pairs]
        self._of_pairs = self._part[order][:, order]

    def _retry(self, walked: Tensor, factor: float) -> None:
        """Takes another multiple of the step that was walked."""
        assert self._begin is not None, "a line has a beginning"
        point = self._begin[0] + factor * walked

        def move(values: Tensor) -> None:
            values.copy_(point)

        self._shard.change(move)

    def _walk(
        self, vectors: Sequence[Tensor], gram: Tensor, pairs: Sequence[Pair], learning_rate: float
    ) -> None:
        """Takes the first step along a new line."""
        shares = two_loop(gram, pairs, len(vectors) - 1)
        gradient = vectors[-1]
        if pairs and not float(gram[-1] @ shares) > 0:  # rounding has eaten the curvature
            pairs = ()
            self._keep(vectors, pairs)
        direction = gradient if not pairs else combined(vectors, shares)
        self._begin, self._trials = (self._shard.values.clone(), gradient.clone()), 0
        self._shard.step(direction, learning_rate)

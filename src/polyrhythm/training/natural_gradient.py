"""The natural gradient of a layer, by running estimates of the Fisher matrices of its outputs and inputs.

Povey, Zhang, Khudanpur, "Parallel training of DNNs with natural gradient and parameter averaging", ICLR
workshop 2015, arXiv 1410.7455.

    p = A^-1 g B^-1 * |g| / |A^-1 g B^-1|        g: a layer's gradient, (rows, columns)

A is the estimate of the columns of g, B of its rows (see below), both made of the steps before; in the first
step, of its own. When they are renewed, and by how much, is as in the authors' version for PyTorch.

Each estimate is a Fisher matrix as low rank plus a multiple of the identity, with a smoothed inverse
(appendix A, the online method):

    F = R^T D R + r I              R: (K, n) with orthonormal rows, D: K numbers above 0 on a diagonal
    T = (e / m) X^T X + (1 - e) F  with m new rows X; F' is T on the K directions that one power iteration of T finds
    G = F + a tr(F) / n I          smoothed;  X G^-1 = (X - X R^T diag(d / (d + b)) R) / b,  b = r + a tr(F) / n

e is `eta`, a `alpha`. F begins as a multiple of the identity with the trace of the first rows' X^T X / m, and
takes them three times with e = 0.9: then it holds hardly anything else, and rounding has no influence in
directions that they lack. As in the authors' Kaldi, F' has the trace of T, until r and the numbers of D are
raised to
5e-4 of T's largest value, each by itself; and the first basis is not quite even, since what sums to nothing
(the gradients of a softmax do) would leave an even one short of a direction. Departure: nothing is raised to
1e-10, since means over a batch may well be smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ALWAYS_UP_TO = 10
"""Steps that each renew the estimates; later they change slowly."""
_LEAST_BYTES = 4
"""Bytes of a number in the estimates: roots and inverses need at least these."""


@dataclass(frozen=True)
class Fisher:
    """Parameters of the Fisher matrices' estimates.

    Attributes:
        rank: directions of each that are distinguished; 0: none, so that nothing is preconditioned.
        alpha: multiple of its mean that is added to each of its eigenvalues.
        eta: share of an estimate that each renewal replaces.
        update_every: steps from one renewal to the next, after the first ten.
    """

    rank: int
    alpha: float
    eta: float
    update_every: int


def natural_gradient(gradient: Tensor, rows: int, state: dict[str, Any], fisher: Fisher) -> Tensor:
    """Return a layer's preconditioned gradient, as long as the gradient itself; renew the estimates afterwards.

    Args:
        gradient: gradient of a layer, of any shape, not changed.
        rows: number of rows of the matrix; 0, or no divisor of the size: the gradient is returned unchanged.
        state: state of the layer, empty at first; changed in place.
        fisher: parameters of the estimates.
    """
    if fisher.rank == 0 or not 1 < rows < gradient.numel() or gradient.numel() % rows:
        return gradient
    # Memory of its own: how a library multiplies depends on where a matrix begins.
    exact = gradient.dtype if gradient.dtype.itemsize >= _LEAST_BYTES else torch.float32
    inputs = gradient.reshape(rows, -1).to(exact, copy=True, memory_format=torch.contiguous_format)
    length = torch.linalg.vector_norm(inputs)
    if not bool(length > 0):
        return gradient
    outputs = inputs.T.contiguous()
    steps = state.get("steps", 0)
    state["steps"] = steps + 1
    renews = steps > 0 and (steps < _ALWAYS_UP_TO or steps % fisher.update_every == 0)
    of_outputs = _estimate(state, "outputs", outputs, fisher.rank)
    of_inputs = _estimate(state, "inputs", inputs, fisher.rank)
    found = of_outputs.preconditioned(outputs, fisher.alpha).T.contiguous()
    found = of_inputs.preconditioned(found, fisher.alpha)
    if renews:
        of_outputs.update(outputs, fisher.eta)
        of_inputs.update(inputs, fisher.eta)
    for side, estimate in (("outputs", of_outputs), ("inputs", of_inputs)):
        state[f"{side}_basis"], state[f"{side}_spectrum"] = estimate.basis, estimate.spectrum
    as_long: Tensor = found * (length / torch.linalg.vector_norm(found))
    return as_long.reshape(gradient.shape).to(gradient.dtype)


def _estimate(state: dict[str, Any], side: str, rows: Tensor, rank: int) -> LowRankFisher:
    if f"{side}_basis" in state:
        return LowRankFisher(state[f"{side}_basis"], state[f"{side}_spectrum"])
    return LowRankFisher.of(rows, min(rank, rows.shape[1] - 1))


_FIRST_TURNS = 3
_FIRST_ETA = 0.9
_UNEVEN = 1.1
_LEAST_SHARE = 5e-4  # least share of the largest eigenvalue
_LEAST = 1e-20


@dataclass
class LowRankFisher:
    """The estimate.

    Attributes:
        basis: `(K, n)`, R.
        spectrum: `(K + 1,)`: d, and r last.
    """

    basis: Tensor
    spectrum: Tensor

    @classmethod
    def of(cls, rows: Tensor, rank: int) -> LowRankFisher:
        """Begin an estimate.

        Args:
            rows: `(m, n)`, not all 0.
            rank: K, below n.
        """
        size = rows.shape[1]
        basis = rows.new_zeros(rank, size)
        basis[torch.arange(size) % rank, torch.arange(size)] = 1.0
        basis.diagonal().mul_(_UNEVEN)
        basis.div_(basis.norm(dim=1, keepdim=True))
        found = cls(basis, rows.new_zeros(rank + 1))
        found.spectrum[-1] = rows.square().sum() / rows.numel()
        for _ in range(_FIRST_TURNS):
            found.update(rows, _FIRST_ETA)
        return found

    @property
    def trace(self) -> Tensor:
        """Trace of F."""
        return self.spectrum[:-1].sum() + self.spectrum[-1] * self.basis.shape[1]

    def update(self, rows: Tensor, eta: float) -> None:
        """Update the estimate with new rows, in place.

        Args:
            rows: `(m, n)`.
            eta: the share that they make of it.
        """
        rank, size = self.basis.shape
        share, kept = eta / len(rows), 1.0 - eta
        turned = (rows @ self.basis.T).T @ rows * share
        turned += kept * (self.spectrum[:-1] + self.spectrum[-1]).unsqueeze(1) * self.basis  # R T
        squares, directions = torch.linalg.eigh((turned @ turned.T).double())
        # Eigenvalues of T on the directions found, largest first.
        values = squares.clamp_min(0).sqrt().flip(0).to(rows.dtype).clamp_min(kept * self.spectrum[-1])
        trace = share * rows.square().sum() + kept * self.trace
        least = torch.maximum(_LEAST_SHARE * values[0], values.new_tensor(_LEAST))
        rest = (trace - values.sum()) / (size - rank)
        # A direction with a value near zero is noise: the rest of it is made orthonormal again.
        scaled = (directions.flip(1).T.to(rows.dtype) @ turned) / values.clamp_min(_LEAST).unsqueeze(1)
        self.basis = torch.linalg.qr(scaled.T).Q.T.contiguous()
        self.spectrum = torch.maximum(torch.cat([values - rest, rest.reshape(1)]), least)

    def preconditioned(self, rows: Tensor, alpha: float) -> Tensor:
        """Return `X G^-1`, `(m, n)`, but for a factor common to all of it.

        Args:
            rows: X, `(m, n)`.
            alpha: parameter alpha of the smoothing.
        """
        size = self.basis.shape[1]
        floor = self.spectrum[-1] + alpha * self.trace / size
        share = self.spectrum[:-1] / (self.spectrum[:-1] + floor)
        return rows - (rows @ self.basis.T * share) @ self.basis

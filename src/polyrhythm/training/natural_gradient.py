"""The natural gradient of a layer, by running estimates of the Fisher matrices of its outputs and inputs.

Povey, Zhang, Khudanpur, "Parallel training of DNNs with natural gradient and parameter averaging", ICLR workshop 2015,
arXiv 1410.7455.

    p = A^-1 g B^-1 * |g| / |A^-1 g B^-1|        g: a layer's gradient, (rows, columns)

A is the estimate of the columns of g, B of its rows (see `low_rank_fisher`), both made of the steps before; in the
first step, of its own. When they are renewed, and by how much, is as in the authors' version for PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyrhythm.training.low_rank_fisher import LowRankFisher

_ALWAYS_UP_TO = 10
"""Steps in whose each the estimates are renewed; later they change slowly."""
_LEAST_BYTES = 4
"""Of a number in the estimates, whose roots and inverses shorter ones are too coarse for."""


@dataclass(frozen=True)
class Fisher:
    """How Fisher matrices are estimated.

    Attributes:
        rank: directions of each that are told apart; 0: none, so that nothing is preconditioned.
        alpha: how much of its mean is added to each of its eigenvalues.
        eta: share of an estimate that each renewal replaces.
        update_every: steps from one renewal to the next, after the first ten.
    """

    rank: int
    alpha: float
    eta: float
    update_every: int


def natural_gradient(gradient: Tensor, rows: int, state: dict[str, Any], fisher: Fisher) -> Tensor:
    """Gives a layer's preconditioned gradient, as long as the gradient itself; renews the estimates afterwards.

    Args:
        gradient: of a layer, of any shape, not changed.
        rows: of its matrix; with 0, or if it is none, the gradient comes back as it is.
        state: of the layer, empty at first; changed in place.
        fisher: how matrices are estimated.
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

"""CHOCO: gossip with compressed differences between a worker's parameters and its neighbors' copies of them.

Koloskova, Stich, Jaggi, "Decentralized stochastic optimization and gossip algorithms with compressed communication",
ICML 2019, arXiv 1902.00340.

    q_i = C(x_i - k_i),   k_j <- k_j + q_j  for all senders j and i itself          k: copies, equal on all holders
    x_i <- x_i + gamma * sum_j W_ij (k_j - k_i)

The compression error of q_i is part of the next difference, so no separate residual is needed. W preserves the sum over
all workers. With lossless compression and gamma = 1 this is mixing of whole models.

gamma, the consensus step size, must be smaller for stronger compression. The default is d^1.3, where d is the share of
the squared norm of Gaussian numbers that C keeps: 0.04 for the largest 1 %, the best value in the authors' experiments,
and 1 without loss. With d <= 0, also for small vectors only, copies do not converge to the parameters.

Departure from the paper: copies start at the common initial parameters, not at zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from polyrhythm.compression.compressor import Compressor, Memory, Place
from polyrhythm.compression.layout import Layout
from polyrhythm.errors import RequestError
from polyrhythm.strategies.state import State, check_shape
from polyrhythm.training.flat_parameters import FlatParameters, is_finite

_SIDE, _SCALES, _POWER = 64, (1.0, 1e-4), 1.3
_OWN, _COMMON = "own", "common"
_NOT_FINITE = 1
"""Size in bytes of the payload of a non-finite model; all other payloads are longer."""


def check_choco(compressor: Compressor) -> None:
    """Raise `RequestError` for a compressor with which copies would not converge to the parameters."""
    if compressor.votes or compressor.own_momentum or compressor.from_passes:
        raise RequestError(
            f"{compressor.name} is made for gradients, and neighbors send changes of models: use top_k, "
            "power_sgd or int8"
        )
    if compressor.loud or share_kept(compressor) <= 0:
        raise RequestError(
            f"{compressor}: its error may exceed the vector that it encodes, so copies of neighbors would not "
            "converge: use top_k, int8 or one_bit"
        )


@lru_cache(maxsize=64)
def share_kept(compressor: Compressor) -> float:
    """Return d = 1 - |v - C(v)|^2 / |v|^2 of a matrix of Gaussian numbers, the minimum over several scales."""
    place, found = Place(_SIDE, _SIDE, step=compressor.warm_up), []
    for scale in _SCALES:
        vector = scale * torch.randn(place.numbers, generator=torch.Generator().manual_seed(0))
        decoded = compressor.decode(compressor.encode(vector, place), place)
        found.append(1 - float((vector - decoded).square().sum() / vector.square().sum()))
    return min(found)


def consensus_step(compressor: Compressor) -> float:
    """Return gamma for a compressor, in (0, 1]."""
    return float(min(1.0, share_kept(compressor)) ** _POWER)


class Copies:
    """Copies of one worker's parameters and of its neighbors', as held by all of them.

    Args:
        flat: parameters of the worker.
        compressor: compressor of the differences between parameters and copies.
        gamma: consensus step size.
    """

    def __init__(self, flat: FlatParameters, compressor: Compressor, gamma: float) -> None:
        self._vector = flat.vector
        self._compressor = compressor
        self._layout = Layout.of_model(flat, compressor)
        self._gamma = gamma
        self._factors: Memory = {}
        self.begin_at(flat.vector)

    def begin_at(self, vector: Tensor) -> None:
        """Restart with all workers at a point, `(size,)`, the same bits everywhere."""
        self._common = self._own = vector.detach().cpu().clone()
        self._of: dict[int, Tensor] = {}
        self._moved: Tensor | None = None
        self._factors = {}

    def encode(self, vector: Tensor, step: int, rank: int) -> Tensor:
        """Return the compressed difference between this worker's vector, `(size,)`, and its copy, as uint8."""
        moved = vector.detach().cpu() - self._own
        if not is_finite(moved):
            self._moved = torch.full_like(moved, float("nan"))
            return torch.zeros(_NOT_FINITE, dtype=torch.uint8)
        factors = dict(self._factors)
        payload = self._layout.encode(self._compressor, moved, step=step, rank=rank, factors=factors)
        self._moved = self._layout.decode(self._compressor, payload, moved.dtype, rank)
        self._pending = factors
        return payload

    def mix(self, vector: Tensor, received: Iterable[tuple[int, Tensor, float]]) -> None:
        """Update the copies with the received differences, and move the vector toward the neighbors' copies, in place.

        Args:
            vector: parameters of this worker, `(size,)`.
            received: sender, payload, and weight W_ij of each message.
        """
        assert self._moved is not None, "its own payload was sent before others are mixed in"
        self._own = self._own + self._moved
        self._factors = self._pending if is_finite(self._moved) else self._factors
        self._moved = None
        way = torch.zeros_like(self._own)
        for source, payload, share in received:
            before = self._of.get(source, self._common)
            if payload.numel() == _NOT_FINITE:
                self._of[source] = torch.full_like(before, float("nan"))
            else:
                moved = self._layout.decode(self._compressor, payload, before.dtype, source)
                self._of[source] = before + moved
            way.add_(self._of[source] - self._own, alpha=share)
        vector.add_(way.to(vector.device), alpha=self._gamma)

    def state(self) -> State:
        """Return the copies by owner, and the warm-start factors of the compressor."""
        of = {str(source): copy for source, copy in self._of.items()} or {_COMMON: self._common}
        return {_OWN: self._own} | of | self._factors, {}

    def load_state(self, state: State) -> None:
        """Restore what `state` returned; with an empty state, restart at the worker's parameters."""
        self.begin_at(self._vector)
        tensors = state[0]
        if not tensors:
            return
        for name, value in tensors.items():
            if not name.startswith("factor."):
                check_shape(name, value, self._own)
        self._own = tensors[_OWN].cpu().clone()
        if _COMMON in tensors:
            self._common = tensors[_COMMON].cpu().clone()
        self._of = {int(name): copy.cpu().clone() for name, copy in tensors.items() if name.isdigit()}
        self._factors = {name: value for name, value in tensors.items() if name.startswith("factor.")}

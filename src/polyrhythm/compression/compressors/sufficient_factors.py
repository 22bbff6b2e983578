"""Sufficient factors: a fully connected layer's gradient as the rows of its sum of outer products.

Xie, Kim, Zhou, Ho, Kumar, Yu, Xing, "Lighter-communication distributed machine learning via sufficient factor
broadcasting", UAI 2016, arXiv 1409.5705; Zhang et al., "Poseidon", ATC 2017, arXiv 1706.03292, for the choice by layer;
Chilimbi, Suzue, Apacible, Kalyanaraman, "Project Adam", OSDI 2014, for factors up to servers and parameters down.

    dW = sum_k u_k v_k^T        u (K, rows) errors, v (K, columns) inputs of a worker's K samples

The compression is exact up to rounding, and there is no residual. Of `rows * columns` numbers, K (rows +
columns) are sent. Among N workers that is less than an all-reduce iff

    N K (rows + columns) < 2 rows columns        N K: the rows of all workers, as the step before had them

and to a server iff K (rows + columns) < rows columns. All else travels as it is: other layers, and gradients that their
factors do not add up to (clipped, scaled or changed by hand before the exchange), which is looked at every time.

Payload: u32 K, then u and v by rows, in the vector's type; or K = 0, then the gradient as it is, or nothing if it is
zero.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from pydantic import model_validator
from torch import Tensor

from polyrhythm.communication.message import MalformedMessage
from polyrhythm.compression.compressor import SCALAR_BYTES, Compressor, Place, bytes_of, values_of
from polyrhythm.errors import RequestError
from polyrhythm.training.linear_factors import Pair

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
_COARSE = 3e-2


class SufficientFactors(Compressor):
    """Errors and inputs of fully connected layers in place of their gradients.

    Attributes:
        feedback: error feedback; always off: the compression is exact.
        per: always `layer`, since factors are those of a layer.
    """

    biased: ClassVar[bool] = False
    from_passes: ClassVar[bool] = True

    feedback: bool = False

    @model_validator(mode="after")
    def _exact(self) -> Self:
        if self.feedback or self.per != "layer":
            raise RequestError(
                "sufficient_factors sends each layer's gradient whole: leave feedback and per out"
            )
        return self

    def nbytes(self, place: Place) -> None:
        """None: it depends on the batch."""

    def from_rows(self, rows: float, place: Place) -> bool:
        """Return whether to broadcast the factors of a layer costs less than to all-reduce its gradient.

        Args:
            rows: rows of all workers' factors together.
            place: place of the layer.
        """
        return 0 < rows * (place.rows + place.columns) < 2 * place.numbers

    def encode(self, vector: Tensor, place: Place, newest: Tensor | None = None) -> Tensor:
        if not bool(vector.any()):
            return _count(0)
        pair = place.pair
        smaller = pair is not None and 0 < len(pair[0]) * (place.rows + place.columns) < place.numbers
        if pair is None or not smaller or not adds_up(pair, vector.view(place.rows, place.columns)):
            return torch.cat([_count(0), bytes_of(vector)])
        left, right = (factor.to(vector) for factor in pair)
        return torch.cat([_count(len(left)), bytes_of(left), bytes_of(right)])

    def decode(self, payload: Tensor, place: Place) -> Tensor:
        total = payload.new_zeros(place.numbers, dtype=place.dtype)
        self.add_to(total, payload, place)
        return total

    def add_to(self, total: Tensor, payload: Tensor, place: Place) -> None:
        if payload.numel() < SCALAR_BYTES:
            raise MalformedMessage("factors arrived without their count")
        count = int(values_of(payload[:SCALAR_BYTES], torch.int32))
        wanted = count * (place.rows + place.columns) if count else place.numbers
        nothing = not count and payload.numel() == SCALAR_BYTES
        if count < 0 or not (nothing or payload.numel() == SCALAR_BYTES + wanted * place.dtype.itemsize):
            raise MalformedMessage(f"{payload.numel()} bytes arrived for {count} rows of sufficient factors")
        numbers = values_of(payload[SCALAR_BYTES:], place.dtype)
        if not numbers.numel():
            return
        if not count:
            total.add_(numbers)
            return
        left = numbers[: count * place.rows].view(count, place.rows)
        right = numbers[count * place.rows :].view(count, place.columns)
        total.view(place.rows, place.columns).addmm_(left.t(), right)


def adds_up(pair: Pair, gradient: Tensor) -> bool:
    """Return whether factors are those of a gradient, `(rows, columns)`, seen along one direction.

    Any other gradient differs along a direction that is no eigenvector, at the cost of reading it once.
    """
    left, right = (factor.to(gradient) for factor in pair)
    if (
        left.shape[1:] != gradient.shape[:1]
        or right.shape[1:] != gradient.shape[1:]
        or len(left) != len(right)
    ):
        return False
    along = torch.cos(torch.arange(gradient.shape[1], dtype=torch.float64)).to(gradient.dtype)
    whole, made = gradient @ along, left.t() @ (right @ along)
    tolerance = _TOLERANCE.get(gradient.dtype, _COARSE)
    return bool((whole - made).norm() <= tolerance * whole.norm().clamp_min(1e-30))


def _count(rows: int) -> Tensor:
    return bytes_of(torch.tensor([rows], dtype=torch.int32))

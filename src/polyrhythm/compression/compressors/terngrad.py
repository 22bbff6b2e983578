"""TernGrad: the sign or nothing, by chance.

Wen, Xu, Yan, Wu, Wang, Chen, Li, "TernGrad: ternary gradients to reduce communication in distributed deep learning",
NIPS 2017, arXiv 1705.07878.

    p <- clamp(p, -c sigma, c sigma)              c is `clip`, sigma the deviation within the layer
    d_j = s sgn(p_j) [u_j < |p_j| / s]            s = max|p|, the largest of all workers' (`shares_scaler`)

Unbiased with respect to the clipped gradient, with variance |p_j| (s - |p_j|). The authors' code takes c
sigma itself for s; the largest remaining magnitude, as here, gives less variance.

Payload: one float32, s, then two bits a number: 0, 1 for +s, 2 for -s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from polyrhythm.communication.message import MalformedMessage
from polyrhythm.compression.compressor import (
    SCALAR_BYTES,
    Place,
    bytes_of,
    check_length,
    values_of,
)
from polyrhythm.compression.in_pieces import InPieces, Uniforms, pieces
from polyrhythm.compression.packing import pack, packed_bytes, unpack
from polyrhythm.training.quantities import NonNegative

_BITS = 2


class TernGrad(InPieces):
    """Two bits a number, unbiased except for clipping.

    Attributes:
        clip: bound in deviations of a layer's gradient; 0: no clipping.
        seed: seed of the draws.
        feedback: error feedback; off by default, since errors are larger than the encoded values.
    """

    biased: ClassVar[bool] = False
    shares_scaler: ClassVar[bool] = True

    clip: NonNegative = 2.5
    seed: int = 0
    feedback: bool = False

    @property
    def loud(self) -> bool:
        return True

    def scaler(self, vector: Tensor) -> float:
        return self._scaler(vector, self._bound(vector))

    def nbytes(self, place: Place) -> int:
        return SCALAR_BYTES + packed_bytes(place.numbers, _BITS)

    def encode(self, vector: Tensor, place: Place, newest: Tensor | None = None) -> Tensor:
        bound = self._bound(vector)
        scale = self._scaler(vector, bound) if place.scaler is None else place.scaler
        draws = Uniforms(place.draws(self.seed), vector.device)
        parts = [bytes_of(torch.full((1,), scale, device=vector.device))]
        for piece in pieces(vector.numel(), 1, vector.device):
            values = vector[piece].float()
            chances = values.abs()
            if scale > bound:  # else a draw times the scale stays below the bound
                chances.clamp_(max=bound)
            sent = (draws.next(len(values), scale) < chances).view(torch.uint8)
            parts.append(pack(sent << (values < 0).view(torch.uint8), _BITS))
        return torch.cat(parts)

    def decoded(self, payload: Tensor, place: Place) -> Iterator[tuple[slice, Tensor]]:
        check_length(self.name, payload, self.nbytes(place))
        scale = values_of(payload[:SCALAR_BYTES], torch.float32)
        for piece in pieces(place.numbers, 1, payload.device):
            start, stop = (SCALAR_BYTES + packed_bytes(end, _BITS) for end in (piece.start, piece.stop))
            codes = unpack(payload[start:stop], piece.stop - piece.start, _BITS)
            negative = codes >> 1
            if bool((codes & negative).any()):
                raise MalformedMessage("a ternary number is none of three")
            yield piece, codes.sub_(negative.mul_(3)).view(torch.int8).float().mul_(scale)

    def _scaler(self, vector: Tensor, bound: float) -> float:
        if not vector.numel():
            return 0.0
        least, most = vector.float().aminmax()
        return float(torch.maximum(most, -least).clamp(max=bound))

    def _bound(self, vector: Tensor) -> float:
        """Return the largest magnitude that is not clipped."""
        if not self.clip or not vector.numel():
            return float("inf")
        return self.clip * float(vector.float().std(correction=0))

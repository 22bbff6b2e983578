"""TernGrad: the sign or nothing, by chance.

Wen, Xu, Yan, Wu, Wang, Chen, Li, "TernGrad: ternary gradients to reduce communication in distributed deep learning",
NIPS 2017, arXiv 1705.07878.

    p <- clamp(p, -c sigma, c sigma)              c is `clip`, sigma the deviation within the layer
    d_j = s sgn(p_j) [u_j < |p_j| / s]            s = max|p|, the largest of all workers' (`shares_scaler`)

Unbiased with respect to the clipped gradient, with variance |p_j| (s - |p_j|). The authors' code takes c sigma itself
for s; the largest magnitude that is left, as here, gives less variance.

Payload: one float32, s, then two bits a number: 0, 1 for +s, 2 for -s.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from polyrhythm.communication.message import MalformedMessage
from polyrhythm.compression.compressor import (
    SCALAR_BYTES,
    Compressor,
    Place,
    bytes_of,
    check_length,
    values_of,
)
from polyrhythm.compression.packing import pack, packed_bytes, unpack
from polyrhythm.training.quantities import NonNegative

_BITS = 2


class TernGrad(Compressor):
    """Two bits a number, right in the mean but for what is clipped.

    Attributes:
        clip: in deviations of a layer's gradient; 0: nothing is clipped.
        seed: of the draws.
        feedback: errors are larger than what is encoded.
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
        return float(self._clipped(vector).abs().max()) if vector.numel() else 0.0

    def nbytes(self, place: Place) -> int:
        return SCALAR_BYTES + packed_bytes(place.numbers, _BITS)

    def encode(self, vector: Tensor, place: Place, newest: Tensor | None = None) -> Tensor:
        clipped = self._clipped(vector)
        scale = self.scaler(vector) if place.scaler is None else place.scaler
        draws = torch.rand(vector.numel(), generator=place.draws(self.seed))
        codes = (draws * scale < clipped.abs()).to(torch.uint8)
        return torch.cat([bytes_of(torch.tensor(scale)), pack(codes << (clipped < 0).to(torch.uint8), _BITS)])

    def decode(self, payload: Tensor, place: Place) -> Tensor:
        check_length(self.name, payload, self.nbytes(place))
        codes = unpack(payload[SCALAR_BYTES:], place.numbers, _BITS)
        if place.numbers and int(codes.max()) > _BITS:
            raise MalformedMessage("a ternary number came that is none of three")
        scale = values_of(payload[:SCALAR_BYTES], torch.float32)
        signs = (codes & 1).to(torch.int8) - (codes >> 1).to(torch.int8)
        return (signs.float() * scale).to(place.dtype)

    def _clipped(self, vector: Tensor) -> Tensor:
        vector = vector.float()
        if not self.clip or not vector.numel():
            return vector
        bound = self.clip * float(vector.std(correction=0))
        return vector.clamp(-bound, bound)

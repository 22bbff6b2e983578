"""Signs times the mean magnitude, with error feedback.

Karimireddy, Rebjock, Stich, Jaggi, "Error feedback fixes signSGD and other gradient compression schemes", ICML 2019,
arXiv 1901.09847.

    d = (|p|_1 / n) sgn(p)        of a section; sgn(0) = +1
    |p - d|^2 = (1 - |p|_1^2 / (n |p|_2^2)) |p|^2

The scale |p|_2 / sqrt(n) that others use is no contraction, and is not offered.

Payload: one float32, then one bit a number, 1 for those at or above zero.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from polyrhythm.compression.compressor import (
    SCALAR_BYTES,
    Compressor,
    Place,
    bytes_of,
    check_length,
    values_of,
)
from polyrhythm.compression.packing import pack, packed_bytes, unpack


class EFSignSGD(Compressor):
    """One bit a number, and one scale a layer."""

    biased: ClassVar[bool] = True

    def nbytes(self, place: Place) -> int:
        return SCALAR_BYTES + packed_bytes(place.numbers, 1)

    def encode(self, vector: Tensor, place: Place, newest: Tensor | None = None) -> Tensor:
        scale = vector.float().abs().sum() / max(1, vector.numel())
        return torch.cat([bytes_of(scale), pack(vector >= 0, 1)])

    def decode(self, payload: Tensor, place: Place) -> Tensor:
        check_length(self.name, payload, self.nbytes(place))
        scale = values_of(payload[:SCALAR_BYTES], torch.float32)
        signs = unpack(payload[SCALAR_BYTES:], place.numbers, 1).to(torch.float32)
        return signs.mul_(2).sub_(1).mul_(scale).to(place.dtype)

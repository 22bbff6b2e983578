"""Eight-bit floating point, in blocks with a scale.

Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433, 2022, for the types; one float32 scale a block,
as those who average models in eight bits use.

    s = max|p| / L of a block        L = 448 (e4m3) or 57344 (e5m2); 1 for a block of zeros
    d = s * float8(p / s)            clamped before the cast, which e4m3, without infinities, needs

Payload: one float32 a block, then one byte a number.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from polyrhythm.compression.compressor import (
    SCALAR_BYTES,
    Compressor,
    Place,
    buckets_of,
    bytes_of,
    check_length,
    values_of,
)
from polyrhythm.training.quantities import Count

_TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class FP8(Compressor):
    """One byte a number.

    Attributes:
        form: bits of exponent and mantissa.
        block: numbers that share a scale.
    """

    biased: ClassVar[bool] = True

    form: Literal["e4m3", "e5m2"] = "e4m3"
    block: Count = 256

    def nbytes(self, place: Place) -> int:
        return -(-place.numbers // self.block) * SCALAR_BYTES + place.numbers

    def encode(self, vector: Tensor, place: Place, newest: Tensor | None = None) -> Tensor:
        if not vector.numel():
            return vector.new_empty(0, dtype=torch.uint8)
        kind, blocks = _TYPES[self.form], buckets_of(vector, self.block)
        largest = torch.finfo(kind).max
        scales = blocks.abs().amax(1, keepdim=True) / largest
        scales[scales == 0] = 1.0
        codes = (blocks / scales).clamp_(-largest, largest).to(kind)
        return torch.cat([bytes_of(scales), bytes_of(codes)[: vector.numel()]])

    def decode(self, payload: Tensor, place: Place) -> Tensor:
        check_length(self.name, payload, self.nbytes(place))
        numbers, first = place.numbers, -(-place.numbers // self.block) * SCALAR_BYTES
        if not numbers:
            return torch.zeros(0, dtype=place.dtype)
        scales = values_of(payload[:first], torch.float32)
        values = buckets_of(values_of(payload[first:], _TYPES[self.form]), self.block)
        return (values * scales[:, None]).view(-1)[:numbers].to(place.dtype)

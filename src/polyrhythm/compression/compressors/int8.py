"""Whole numbers of eight bits, in blocks with a scale.

Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016, arXiv 1511.04561, for the idea; linear
codes and one float32 scale a block, as most systems have them.

    s = max|p| / 127 of a block        1 for a block of zeros
    d = s * round(p / s)               off by at most s / 2

Payload: one float32 a block, then one byte a number.
"""

from __future__ import annotations

from typing import ClassVar

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

_LARGEST = 127


class Int8(Compressor):
    """One byte a number.

    Attributes:
        block: numbers that share a scale.
    """

    biased: ClassVar[bool] = True

    block: Count = 256

    def nbytes(self, place: Place) -> int:
        return -(-place.numbers // self.block) * SCALAR_BYTES + place.numbers

    def encode(self, vector: Tensor, place: Place, newest: Tensor | None = None) -> Tensor:
        if not vector.numel():
            return vector.new_empty(0, dtype=torch.uint8)
        blocks = buckets_of(vector, self.block)
        scales = blocks.abs().amax(1, keepdim=True) / _LARGEST
        scales[scales == 0] = 1.0
        codes = (blocks / scales).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
        return torch.cat([bytes_of(scales), bytes_of(codes)[: vector.numel()]])

    def decode(self, payload: Tensor, place: Place) -> Tensor:
        check_length(self.name, payload, self.nbytes(place))
        numbers, first = place.numbers, -(-place.numbers // self.block) * SCALAR_BYTES
        if not numbers:
            return torch.zeros(0, dtype=place.dtype)
        scales = values_of(payload[:first], torch.float32)
        values = buckets_of(values_of(payload[first:], torch.int8), self.block)
        return (values * scales[:, None]).view(-1)[:numbers].to(place.dtype)

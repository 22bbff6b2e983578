"""Numbers of one byte each, in blocks with a scale.

    s = max|p| / L of a block        L = the largest code; 1 for a block of zeros
    d = s * code(p / s)

Payload: one float32 a block, then one byte a number.
"""

from __future__ import annotations

from abc import abstractmethod
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


class ScaledBlocks(Compressor):
    """One byte a number.

    Attributes:
        block: numbers that share a scale.
    """

    biased: ClassVar[bool] = True

    block: Count = 256

    @property
    @abstractmethod
    def code(self) -> tuple[torch.dtype, float]:
        """The type of a code, and the largest one."""

    def codes(self, quotients: Tensor) -> Tensor:
        """Return the codes of numbers over their scales, which may be changed."""
        kind, largest = self.code
        return quotients.clamp_(-largest, largest).to(kind)

    def nbytes(self, place: Place) -> int:
        return -(-place.numbers // self.block) * SCALAR_BYTES + place.numbers

    def encode(self, vector: Tensor, place: Place, newest: Tensor | None = None) -> Tensor:
        if not vector.numel():
            return vector.new_empty(0, dtype=torch.uint8)
        blocks = buckets_of(vector, self.block)
        scales = blocks.abs().amax(1, keepdim=True) / self.code[1]
        scales[scales == 0] = 1.0
        return torch.cat([bytes_of(scales), bytes_of(self.codes(blocks / scales))[: vector.numel()]])

    def decode(self, payload: Tensor, place: Place) -> Tensor:
        check_length(self.name, payload, self.nbytes(place))
        numbers, first = place.numbers, -(-place.numbers // self.block) * SCALAR_BYTES
        if not numbers:
            return torch.zeros(0, dtype=place.dtype)
        scales = values_of(payload[:first], torch.float32)
        values = buckets_of(values_of(payload[first:], self.code[0]), self.block)
        return (values * scales[:, None]).view(-1)[:numbers].to(place.dtype)

"""DoReFa's gradients: uniform levels of the largest magnitude, with a dither.

Zhou, Wu, Ni, Zhou, Wen, Zou, "DoReFa-Net: training low bitwidth convolutional neural networks with low bitwidth
gradients", arXiv 1606.06160, 2016.

    x_j = p_j / (2 max|p|) + 1/2              in [0, 1]
    d_j = 2 max|p| (round((2^k - 1) x_j + u_j) / (2^k - 1) - 1/2)        u_j uniform in (-1/2, 1/2); k is `bits`

Right in the mean: a dither as wide as a level makes rounding stochastic. With an even number of levels none of them is
0, so of a vector of zeros nothing but its scale matters.

Payload: one float32, max|p|, then k bits a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polyrhythm.compression.compressor import (
    SCALAR_BYTES,
    Place,
    bytes_of,
    check_length,
    values_of,
)
from polyrhythm.compression.in_pieces import InPieces, Uniforms, pieces
from polyrhythm.compression.packing import pack, packed_bytes, unpack


class DoReFa(InPieces):
    """A few bits a number, right in the mean.

    Attributes:
        bits: bits of a number.
        seed: seed of the draws.
        feedback: errors are larger than what is encoded, where one number is much larger than the others.
    """

    biased: ClassVar[bool] = False

    bits: int = Field(default=4, ge=1, le=8)
    seed: int = 0
    feedback: bool = False

    @property
    def loud(self) -> bool:
        return True

    def nbytes(self, place: Place) -> int:
        return SCALAR_BYTES + packed_bytes(place.numbers, self.bits)

    def encode(self, vector: Tensor, place: Place, newest: Tensor | None = None) -> Tensor:
        last = 2**self.bits - 1
        largest = torch.zeros(())
        if vector.numel():
            least, most = vector.float().aminmax()
            largest = torch.maximum(most, -least)
        share = last / (2 * float(largest)) if float(largest) > 0 else 0.0
        draws = Uniforms(place.draws(self.seed), vector.device)
        parts = [bytes_of(largest)]
        for piece in pieces(vector.numel(), 1, vector.device):
            # floor(x + draw) is round(x + dither), with the dither draw - 1/2.
            scaled = vector[piece].float() * share
            codes = scaled.add_(last / 2).add_(draws.next(len(scaled))).floor_().clamp_(0, last)
            parts.append(pack(codes.to(torch.uint8), self.bits))
        return torch.cat(parts)

    def decoded(self, payload: Tensor, place: Place) -> Iterator[tuple[slice, Tensor]]:
        check_length(self.name, payload, self.nbytes(place))
        last = 2**self.bits - 1
        level = values_of(payload[:SCALAR_BYTES], torch.float32) * (2 / last)
        for piece in pieces(place.numbers, 1, payload.device):
            start, stop = (SCALAR_BYTES + packed_bytes(end, self.bits) for end in (piece.start, piece.stop))
            codes = unpack(payload[start:stop], piece.stop - piece.start, self.bits)
            yield piece, codes.float().sub_(last / 2).mul_(level)

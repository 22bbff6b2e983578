"""One bit a number, with the means of those above and below zero.

Seide, Fu, Droppo, Li, Yu, "1-bit stochastic gradient descent and its application to data-parallel distributed training
of speech DNNs", Interspeech 2014.

    d_j = mean of { p_i >= 0 } where p_j >= 0, else mean of { p_i < 0 }        in each bucket; an empty group: 0

So the residuals of each group of each bucket add up to 0. Departure from the paper, which groups by columns
of a matrix: runs of `bucket` numbers, which need no shape. Longer than a row of a layer, they give one mean
to numbers of
unequal size, which momentum makes much of: `lenet5` then learns slowly or not at all (`benchmarks/compression`).

Payload: two float32 a bucket, then one bit a number, 1 for those at or above zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from polyrhythm.compression.compressor import (
    SCALAR_BYTES,
    Place,
    bucket_lengths,
    buckets_of,
    bytes_of,
    check_length,
    values_of,
)
from polyrhythm.compression.in_pieces import InPieces, pieces
from polyrhythm.compression.packing import pack, packed_bytes, unpack
from polyrhythm.training.quantities import Count


class OneBit(InPieces):
    """One bit a number.

    Attributes:
        bucket: numbers that share two means.
    """

    biased: ClassVar[bool] = True

    bucket: Count = 128

    def nbytes(self, place: Place) -> int:
        return -(-place.numbers // self.bucket) * 2 * SCALAR_BYTES + packed_bytes(place.numbers, 1)

    def encode(self, vector: Tensor, place: Place, newest: Tensor | None = None) -> Tensor:
        parts = [self._encoded(vector[piece]) for piece in pieces(vector.numel(), self.bucket, vector.device)]
        return torch.cat([*(bytes_of(means) for means, _ in parts), *(codes for _, codes in parts)])

    def _encoded(self, piece: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means of each bucket, `(buckets, 2)`, and the packed bits."""
        buckets = buckets_of(piece, self.bucket)
        above = buckets.clamp_min(0).sum(1, keepdim=True)  # padding with zeros adds nothing
        below = buckets.clamp_max(0).sum(1, keepdim=True)
        bits = buckets >= 0
        # Padding counts as above; a sum of truth values would take ten times as long.
        smaller = self.bucket - bits.float().sum(1, keepdim=True)
        larger = bucket_lengths(piece.numel(), self.bucket, piece.device) - smaller
        means = torch.cat([above / larger.clamp_min(1), below / smaller.clamp_min(1)], 1)
        return means, pack(bits.view(-1)[: piece.numel()], 1)

    def decoded(self, payload: Tensor, place: Place) -> Iterator[tuple[slice, Tensor]]:
        check_length(self.name, payload, self.nbytes(place))
        numbers = place.numbers
        first = -(-numbers // self.bucket) * 2 * SCALAR_BYTES
        means = values_of(payload[:first], torch.float32).view(-1, 2)
        for piece in pieces(numbers, self.bucket, payload.device):
            size = piece.stop - piece.start
            codes = payload[first + piece.start // 8 : first + -(-piece.stop // 8)]
            bits = buckets_of(unpack(codes, size, 1), self.bucket)
            own = means[piece.start // self.bucket : -(-piece.stop // self.bucket)]
            yield piece, torch.lerp(own[:, 1:], own[:, :1], bits).view(-1)[:size]

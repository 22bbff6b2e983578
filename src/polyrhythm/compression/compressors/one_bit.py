"""One bit a number, with the means of those above and below zero.

Seide, Fu, Droppo, Li, Yu, "1-bit stochastic gradient descent and its application to data-parallel distributed training
of speech DNNs", Interspeech 2014.

    d_j = mean of { p_i >= 0 } where p_j >= 0, else mean of { p_i < 0 }        in each bucket; an empty group: 0

So the residuals of each group of each bucket add up to 0. Departure from the paper, whose groups are columns of a
matrix: runs of `bucket` numbers, which need no shape.

Payload: two float32 a bucket, then one bit a number, 1 for those at or above zero.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from polyrhythm.compression.compressor import (
    SCALAR_BYTES,
    Compressor,
    Place,
    bucket_lengths,
    buckets_of,
    bytes_of,
    check_length,
    values_of,
)
from polyrhythm.compression.packing import pack, packed_bytes, unpack
from polyrhythm.training.quantities import Count


class OneBit(Compressor):
    """One bit a number.

    Attributes:
        bucket: numbers that share two means.
    """

    biased: ClassVar[bool] = True

    bucket: Count = 1024

    def nbytes(self, place: Place) -> int:
        return -(-place.numbers // self.bucket) * 2 * SCALAR_BYTES + packed_bytes(place.numbers, 1)

    def encode(self, vector: Tensor, place: Place, newest: Tensor | None = None) -> Tensor:
        buckets = buckets_of(vector, self.bucket)
        above = buckets.clamp_min(0).sum(1, keepdim=True)  # zeros in what is left over add nothing
        below = buckets.clamp_max(0).sum(1, keepdim=True)
        smaller = (buckets < 0).float().sum(1, keepdim=True)  # of truth values it takes ten times as long
        larger = bucket_lengths(vector.numel(), self.bucket) - smaller
        means = torch.cat([above / larger.clamp_min(1), below / smaller.clamp_min(1)], 1)
        return torch.cat([bytes_of(means), pack(vector >= 0, 1)])

    def decode(self, payload: Tensor, place: Place) -> Tensor:
        check_length(self.name, payload, self.nbytes(place))
        numbers, first = place.numbers, -(-place.numbers // self.bucket) * 2 * SCALAR_BYTES
        means = values_of(payload[:first], torch.float32).view(-1, 2)
        bits = buckets_of(unpack(payload[first:], numbers, 1), self.bucket)
        return torch.lerp(means[:, 1:], means[:, :1], bits).view(-1)[:numbers].to(place.dtype)

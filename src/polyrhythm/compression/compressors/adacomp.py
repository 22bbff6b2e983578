"""AdaComp: in each bin what the newest gradient may bring to the top.

Chen, Choi, Brand, Agrawal, Zhang, Gopalakrishnan, "AdaComp: adaptive residual gradient compression for data-parallel
distributed training", AAAI 2018, arXiv 1712.02679.

    G = r + g,   H = G + g                          the newest gradient counts twice
    d_j = s sgn(G_j) where |H_j| >= max of |G| over j's bin, else 0        s = mean of the bins' largest |G|
    r = G - d

In a bin that is not all zeros at least one number is sent where g is 0. Bins are of 50 numbers for convolutions and of
500 for fully connected layers in the paper; here of `bin`.

Payload: float32 s, u32 count, then a u32 for each number, 2 * index + (1 if negative), in ascending order.
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
    buckets_of,
    bytes_of,
    values_of,
)
from polyrhythm.compression.sparse import check_ascending
from polyrhythm.training.quantities import Count

_WORD = 1 << 32


class AdaComp(Compressor):
    """Four bytes a number that rises to the top of its bin.

    Attributes:
        bin: numbers of a bin.
    """

    biased: ClassVar[bool] = True
    sparse: ClassVar[bool] = True

    bin: Count = 500

    def newest(self, gradient: Tensor) -> Tensor | None:
        return gradient

    def nbytes(self, place: Place) -> None:
        """None: it depends on the values."""

    def encode(self, vector: Tensor, place: Place, newest: Tensor | None = None) -> Tensor:
        tops = buckets_of(vector, self.bin).abs()
        tops = tops.amax(1, keepdim=True) if tops.numel() else tops.new_zeros(0, 1)
        scale = tops.mean() if tops.numel() else torch.zeros(())
        twice = vector + (vector if newest is None else newest)
        rises = (buckets_of(twice, self.bin).abs() >= tops) & (tops > 0)
        indices = rises.view(-1)[: vector.numel()].nonzero().view(-1)
        words = indices * 2 + (vector[indices] < 0)
        words = torch.where(words >= _WORD // 2, words - _WORD, words).to(torch.int32)
        count = torch.tensor([indices.numel()], dtype=torch.int32)
        return torch.cat([bytes_of(scale), bytes_of(count), bytes_of(words)])

    def decode(self, payload: Tensor, place: Place) -> Tensor:
        total = torch.zeros(place.numbers, dtype=place.dtype)
        self.add_to(total, payload, place)
        return total

    def add_to(self, total: Tensor, payload: Tensor, place: Place) -> None:
        first = 2 * SCALAR_BYTES
        count = int(values_of(payload[SCALAR_BYTES:first], torch.int32)) if payload.numel() >= first else -1
        if payload.numel() != first + SCALAR_BYTES * count:
            raise MalformedMessage(f"{payload.numel()} bytes arrived for {count} numbers of one size")
        scale = float(values_of(payload[:SCALAR_BYTES], torch.float32))
        words = values_of(payload[first:], torch.int32).long() % _WORD
        indices = words >> 1
        check_ascending(indices, place.numbers)
        total[indices] += torch.where(words % 2 == 1, -scale, scale).to(total.dtype)

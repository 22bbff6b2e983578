"""Quanta of one size, sent once that much has accumulated.

Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015.

    r <- r + g
    d_j = t sgn(r_j) where |r_j| > t, else 0        t is `size`; at most one quantum a number and step
    r <- r - d

With gradients of at most t, |r_j| is at most 2t before sending and t afterwards.

Payload: u32 count, then a u32 for each quantum, 2 * index + (1 if negative), in ascending order. So vectors have fewer
than 2^31 numbers.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from polyrhythm.communication.message import MalformedMessage
from polyrhythm.compression.compressor import SCALAR_BYTES, Compressor, Place, bytes_of, values_of
from polyrhythm.compression.sparse import check_ascending
from polyrhythm.training.quantities import Positive

_WORD = 1 << 32


class Threshold(Compressor):
    """Four bytes for each number that has reached the threshold.

    Attributes:
        size: size of a quantum, in units of gradients.
    """

    biased: ClassVar[bool] = True
    sparse: ClassVar[bool] = True

    size: Positive = 0.001

    def nbytes(self, place: Place) -> None:
        """None: it depends on the values."""

    def encode(self, vector: Tensor, place: Place, newest: Tensor | None = None) -> Tensor:
        indices = (vector.abs() > self.size).nonzero().view(-1)
        words = indices * 2 + (vector[indices] < 0)
        words = torch.where(words >= _WORD // 2, words - _WORD, words).to(torch.int32)
        return torch.cat([bytes_of(torch.tensor([indices.numel()], dtype=torch.int32)), bytes_of(words)])

    def decode(self, payload: Tensor, place: Place) -> Tensor:
        total = torch.zeros(place.numbers, dtype=place.dtype)
        self.add_to(total, payload, place)
        return total

    def add_to(self, total: Tensor, payload: Tensor, place: Place) -> None:
        count = int(values_of(payload[:SCALAR_BYTES], torch.int32)) if payload.numel() >= SCALAR_BYTES else -1
        if payload.numel() != SCALAR_BYTES * (1 + count):
            raise MalformedMessage(f"{payload.numel()} bytes arrived for {count} quanta")
        words = values_of(payload[SCALAR_BYTES:], torch.int32).long() % _WORD
        indices = words >> 1
        check_ascending(indices, place.numbers)
        total[indices] += torch.where(words % 2 == 1, -self.size, self.size).to(total.dtype)

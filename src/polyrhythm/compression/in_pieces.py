"""Vectors that are longer than a cache, encoded and decoded piece by piece.

    payload    heads: float32, of each bucket or of all │ codes: a few bits a number

Of a whole vector each operation on the way to its codes would read and write all of the memory; of a piece all but the
first and the last stay in the cache. A piece has whole buckets, and codes that fill whole bytes, so the bytes are those
of the whole vector.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from math import lcm

import numpy as np
import torch
from torch import Tensor

from polyrhythm.compression.compressor import Compressor, Place

_NUMBERS = 1 << 17
"""Numbers of a piece: half a megabyte of float32, and as much of temporary values, in a second cache of 2 MiB."""
_CODES_IN_BYTES = 8
"""Number of codes that fills whole bytes for every width."""


def pieces(numbers: int, bucket: int, device: torch.device) -> Iterator[slice]:
    """Yield where the pieces of a vector lie, one at least: whole buckets each, and eight codes or a multiple.

    On a GPU the whole vector is one piece: each operation on a piece is a kernel to start.
    """
    unit = lcm(bucket, _CODES_IN_BYTES)
    size = max(1, _NUMBERS // unit) * unit if device.type == "cpu" else max(1, numbers)
    for start in range(0, max(1, numbers), size):
        yield slice(start, min(numbers, start + size))


class Uniforms:
    """Random numbers in (0, 1), evenly distributed, of 16 bits each: k + 1/2 parts of 2^16.

    So a chance is right to 2^-17. They take a third of the time of torch's, which would be most of an encoding.

    On a GPU they are torch's, drawn there: other ones, as evenly distributed.

    Args:
        generator: random generator, which the seed is drawn from.
        device: device of the numbers.
    """

    _PARTS = 1 << 16
    _A_WORD = 4

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        seed = generator.initial_seed()
        self._bits = np.random.SFC64(seed)
        self._device = device
        self._on_device = None if device.type == "cpu" else torch.Generator(device).manual_seed(seed)

    def next(self, numbers: int, scale: float = 1.0) -> Tensor:
        """Return the next numbers times a scale, `(numbers,)` float32; the rest of a 4-number word is discarded."""
        if self._on_device is not None:
            return torch.rand(numbers, generator=self._on_device, device=self._device).mul_(scale)
        words: np.ndarray[tuple[int], np.dtype[np.uint64]] = self._bits.random_raw(
            -(-numbers // self._A_WORD)
        )
        halves = torch.from_numpy(words.view(np.int16)[:numbers])
        return halves.float().mul_(scale / self._PARTS).add_(scale * (0.5 + 0.5 / self._PARTS))


class InPieces(Compressor):
    """A compressor that decodes payloads piece by piece."""

    @abstractmethod
    def decoded(self, payload: Tensor, place: Place) -> Iterator[tuple[slice, Tensor]]:
        """Yield the pieces of the vector that bytes stand for: where each lies, and its numbers, in any dtype.

        Raises:
            MalformedMessage: no `encode` has made the bytes.
        """

    def decode(self, payload: Tensor, place: Place) -> Tensor:
        vector = torch.empty(place.numbers, dtype=place.dtype, device=payload.device)
        for piece, values in self.decoded(payload, place):
            vector[piece] = values
        return vector

    def add_to(self, total: Tensor, payload: Tensor, place: Place) -> None:
        for piece, values in self.decoded(payload, place):
            total[piece].add_(values.to(place.dtype))

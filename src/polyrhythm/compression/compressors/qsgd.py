"""QSGD: stochastic rounding to a few levels of a bucket's norm.

Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: communication-efficient SGD via gradient quantization and encoding",
NIPS 2017, arXiv 1610.02132.

    a_j = s |p_j| / N                      N the 2-norm of the bucket, or its largest magnitude; s is `levels`
    d_j = (N / s) sgn(p_j) (floor(a_j) + [u_j < a_j - floor(a_j)])        u_j uniform; d = 0 where N = 0

Unbiased, with E|d - p|^2 = (N / s)^2 sum_j q_j (1 - q_j), q_j the fraction of a_j; of the 2-norm that is at most
min(n / s^2, sqrt(n) / s) |p|^2.

Payload, `code=packed`: one float32 a bucket, then 1 + ceil(log2(s + 1)) bits a number: 2 * level + (1 if negative).
`code=elias`: one float32 a bucket, u32 numbers that are not 0, u32 bits, then for each such number its distance from
the one before, one bit for its sign, and its level, distances and levels as Elias deltas (Elias, IEEE Transactions on
Information Theory, 1975). The paper has Elias omegas, which are as long to a few bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyrhythm.communication.message import MalformedMessage
from polyrhythm.compression.compressor import (
    SCALAR_BYTES,
    Place,
    buckets_of,
    bytes_of,
    check_length,
    values_of,
)
from polyrhythm.compression.elias import decode_entries, encode_entries
from polyrhythm.compression.in_pieces import InPieces, Uniforms, pieces
from polyrhythm.compression.packing import pack, packed_bytes, unpack
from polyrhythm.training.quantities import Count


class QSGD(InPieces):
    """A few bits a number, right in the mean.

    Attributes:
        levels: between 0 and the norm.
        bucket: numbers that share a norm.
        norm: `two`: the Euclidean norm; `max`: the largest magnitude, for which errors are smaller.
        code: `packed`: equally many bits a number; `elias`: fewer for those that are 0, and more for others.
        seed: of the draws.
        feedback: only where errors are smaller than what is encoded.
    """

    biased: ClassVar[bool] = False

    levels: int = Field(default=7, ge=1, le=127)
    bucket: Count = 128
    norm: Literal["two", "max"] = "max"
    code: Literal["packed", "elias"] = "packed"
    seed: int = 0
    feedback: bool = False

    @property
    def loud(self) -> bool:
        squared, root = self.bucket / self.levels**2, self.bucket**0.5 / self.levels
        return min(squared, root) > 1 if self.norm == "two" else squared / 4 > 1

    @property
    def bits(self) -> int:
        """Of a number, its sign included."""
        return 1 + self.levels.bit_length()

    def nbytes(self, place: Place) -> int | None:
        if self.code == "elias":
            return None
        return self._norm_bytes(place) + packed_bytes(place.numbers, self.bits)

    def encode(self, vector: Tensor, place: Place, newest: Tensor | None = None) -> Tensor:
        draws = Uniforms(place.draws(self.seed))
        parts = [self._levels(vector[piece], draws) for piece in pieces(vector.numel(), self.bucket)]
        norms = [bytes_of(part) for part, _ in parts]
        if self.code == "elias":
            return torch.cat([*norms, encode_entries(torch.cat([levels for _, levels in parts]), vector < 0)])
        codes = [
            pack(levels.mul_(2).add_(vector[piece] < 0), self.bits)
            for piece, (_, levels) in zip(pieces(vector.numel(), self.bucket), parts, strict=True)
        ]
        return torch.cat([*norms, *codes])

    def _levels(self, piece: Tensor, draws: Uniforms) -> tuple[Tensor, Tensor]:
        """Return the norms of buckets, `(buckets,)`, and the numbers' levels, `(n,)` uint8."""
        buckets = buckets_of(piece, self.bucket)
        levels = buckets.abs()
        norms = buckets.norm(dim=1) if self.norm == "two" else _largest(levels)
        share = self.levels / norms
        share[norms == 0] = 0.0
        whole = levels.mul_(share[:, None]).view(-1)[: piece.numel()].add_(draws.next(piece.numel()))
        # Rounding of the division may lead a hair beyond the last level.
        return norms, whole.to(torch.uint8).clamp_(max=self.levels)

    def decoded(self, payload: Tensor, place: Place) -> Iterator[tuple[slice, Tensor]]:
        first, numbers = self._norm_bytes(place), place.numbers
        whole = None
        if self.code == "elias" and payload.numel() >= first:
            whole = decode_entries(payload[first:], numbers)
        else:
            check_length(self.name, payload, self.nbytes(place) if self.code == "packed" else first)
        norms = values_of(payload[:first], torch.float32) / self.levels
        for piece in pieces(numbers, self.bucket):
            size = piece.stop - piece.start
            if whole is None:
                start, stop = (
                    first + piece.start * self.bits // 8,
                    first + packed_bytes(piece.stop, self.bits),
                )
                codes = unpack(payload[start:stop], size, self.bits)
                levels, negative = codes >> 1, codes & 1
            else:
                levels, negative = whole[0][piece], whole[1][piece]
            if size and int(levels.max()) > self.levels:
                raise MalformedMessage(f"a level above {self.levels} came")
            values = buckets_of(levels.float().mul_(negative.float().mul_(-2).add_(1)), self.bucket)
            own = norms[piece.start // self.bucket : -(-piece.stop // self.bucket)]
            yield piece, (values * own[:, None]).view(-1)[:size]

    def _norm_bytes(self, place: Place) -> int:
        return -(-place.numbers // self.bucket) * SCALAR_BYTES


def _largest(magnitudes: Tensor) -> Tensor:
    return magnitudes.amax(1) if magnitudes.numel() else magnitudes.new_zeros(magnitudes.shape[0])

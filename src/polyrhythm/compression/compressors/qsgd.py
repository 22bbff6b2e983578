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
from polyrhythm.compression.in_pieces import InPieces, Uniforms, pieces
from polyrhythm.compression.packing import pack, packed_bytes, unpack
from polyrhythm.training.quantities import Count

_HEAD = 2 * SCALAR_BYTES
_MOST_ZEROS = 5
"""Before a length of at most 63 bits."""


class QSGD(InPieces):
    """A few bits a number, right in the mean.

    Attributes:
        levels: number of levels between 0 and the norm.
        bucket: numbers that share a norm.
        norm: `two`: the Euclidean norm; `max`: the largest magnitude, for which errors are smaller.
        code: `packed`: equally many bits a number; `elias`: fewer for those that are 0, and more for others.
        seed: seed of the draws.
        feedback: error feedback; allowed only where errors are smaller than the encoded values.
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
        """Bits of a number, including its sign."""
        return 1 + self.levels.bit_length()

    def nbytes(self, place: Place) -> int | None:
        if self.code == "elias":
            return None
        return self._norm_bytes(place) + packed_bytes(place.numbers, self.bits)

    def encode(self, vector: Tensor, place: Place, newest: Tensor | None = None) -> Tensor:
        draws = Uniforms(place.draws(self.seed), vector.device)
        parts = [
            self._levels(vector[piece], draws) for piece in pieces(vector.numel(), self.bucket, vector.device)
        ]
        norms = [bytes_of(part) for part, _ in parts]
        if self.code == "elias":
            return torch.cat([*norms, encode_entries(torch.cat([levels for _, levels in parts]), vector < 0)])
        codes = [
            pack(levels.mul_(2).add_(vector[piece] < 0), self.bits)
            for piece, (_, levels) in zip(
                pieces(vector.numel(), self.bucket, vector.device), parts, strict=True
            )
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
        for piece in pieces(numbers, self.bucket, payload.device):
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
                raise MalformedMessage(f"a level above {self.levels} arrived")
            values = buckets_of(levels.float().mul_(negative.float().mul_(-2).add_(1)), self.bucket)
            own = norms[piece.start // self.bucket : -(-piece.stop // self.bucket)]
            yield piece, (values * own[:, None]).view(-1)[:size]

    def _norm_bytes(self, place: Place) -> int:
        return -(-place.numbers // self.bucket) * SCALAR_BYTES


def _largest(magnitudes: Tensor) -> Tensor:
    return magnitudes.amax(1) if magnitudes.numel() else magnitudes.new_zeros(magnitudes.shape[0])


def delta_bits(values: Tensor) -> Tensor:
    """Return the lengths, `(k,)`, of the Elias deltas of whole numbers of at least 1."""
    length = _length(values)
    return 2 * _length(length) - 1 + length - 1


def encode_entries(levels: Tensor, negative: Tensor) -> Tensor:
    """Return the numbers that are not 0 as bytes: Elias deltas of their distances and levels.

        for each: distance from the previous one (of the first: index + 1) │ sign, 1 if negative │ level

    P. Elias, "Universal codeword sets and representations of the integers", IEEE Transactions on Information Theory 21,
    1975. Delta code of x >= 1 with L bits: bit_length(L) - 1 zeros, L, then the bits of x after its leading 1.

        1 ─▶ 1     2 ─▶ 0100     3 ─▶ 0101     4 ─▶ 01100     17 ─▶ 001010001

    Bits go into bytes lowest first. Layout: u32 entries │ u32 bits │ the bits, zeros up to a whole byte.

    Args:
        levels: `(n,)` uint8.
        negative: `(n,)` bool, signs.
    """
    indices = levels.nonzero().view(-1)
    distances = indices.diff(prepend=indices.new_tensor([-1]))
    chosen, signs = levels[indices].long(), negative[indices].long()
    # Three codes an entry: a distance, a sign of one bit, a level.
    codes = torch.stack([_reversed(distances), signs, _reversed(chosen)], 1).view(-1)
    lengths = torch.stack([delta_bits(distances), torch.ones_like(signs), delta_bits(chosen)], 1).view(-1)
    bits = int(lengths.sum())
    starts = lengths.cumsum(0) - lengths
    owner = torch.repeat_interleave(torch.arange(lengths.numel()), lengths, output_size=bits)
    shifts = torch.arange(bits) - starts[owner]
    stream = ((codes[owner] >> shifts) & 1).to(torch.uint8)
    head = torch.tensor([indices.numel(), bits], dtype=torch.int64).to(torch.int32)
    return torch.cat([bytes_of(head), pack(stream, 1)])


def decode_entries(payload: Tensor, numbers: int) -> tuple[Tensor, Tensor]:
    """Return the levels, `(numbers,)` uint8, and signs, `(numbers,)` bool, that bytes stand for.

    Finds, for every position at once, where a code that begins there would end, and follows these from the start by
    doubling, so that nothing is done number by number.

    Raises:
        MalformedMessage: the bytes are no such stream, or one of another vector.
    """
    if payload.numel() < _HEAD:
        raise MalformedMessage("a stream of codes arrived without its length")
    entries, bits = (value % (1 << 32) for value in values_of(payload[:_HEAD], torch.int32).tolist())
    if entries > numbers or payload.numel() != _HEAD + packed_bytes(bits, 1):
        raise MalformedMessage(f"{payload.numel()} bytes arrived for {entries} codes in {bits} bits")
    stream = unpack(payload[_HEAD:], bits, 1)
    ends, values = _deltas(stream)
    after_sign = (ends + 1).clamp_(max=bits)
    following = ends[after_sign]
    begins = _chain(following, entries, bits)
    if int(following[begins[-1]]) != bits if entries else bits:
        raise MalformedMessage("a stream of codes does not end where it should")
    distances = values[begins]
    indices = distances.cumsum(0) - 1
    levels = values[after_sign[begins]]
    if entries and not (
        int(indices[-1]) < numbers
        and int(distances.min()) >= 1
        and int(levels.min()) >= 1
        and int(levels.max()) <= 255
    ):
        raise MalformedMessage("a stream of codes leads beyond its vector")
    signs = torch.cat([stream, stream.new_zeros(1)])[ends[begins]].bool()
    found = torch.zeros(numbers, dtype=torch.uint8)
    negative = torch.zeros(numbers, dtype=torch.bool)
    found[indices], negative[indices] = levels.to(torch.uint8), signs
    return found, negative


def _length(values: Tensor) -> Tensor:
    """Return how many bits whole numbers of at least 1 and below 2^40 have."""
    return torch.frexp(values.double()).exponent.long()


def _reversed(values: Tensor) -> Tensor:
    """Return the deltas of whole numbers as words with the lowest bit first."""
    length = _length(values)
    of_length = _length(length)
    zeros = of_length - 1
    word = torch.zeros_like(values)
    for place in range(6):  # the bits of the length, highest first, after its zeros
        shift = of_length - 1 - place
        inside = shift >= 0
        word |= torch.where(inside, ((length >> shift.clamp_min(0)) & 1) << (zeros + place), 0)
    first = zeros + of_length
    for place in range(int(length.max()) - 1 if length.numel() else 0):
        shift = length - 2 - place
        inside = shift >= 0
        word |= torch.where(inside, ((values >> shift.clamp_min(0)) & 1) << (first + place), 0)
    return word


def _deltas(stream: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each position and the end, where a delta that begins there ends, and its number; at the end if none.

    A number too large for any index is 0.
    """
    bits = stream.numel()
    padded = torch.cat([stream.long(), stream.new_zeros(64).long()])
    positions = torch.arange(bits + 1)
    ones = torch.where(padded[: bits + 1] == 1, positions, bits)
    first = ones.flip(0).cummin(0).values.flip(0)  # the next 1 at or after each position
    zeros = first - positions
    readable = (zeros <= _MOST_ZEROS) & (first < bits)
    zeros = torch.where(readable, zeros, 0)
    length = torch.zeros_like(positions)
    for place in range(_MOST_ZEROS + 1):
        inside = readable & (place <= zeros)
        length = torch.where(inside, length * 2 + padded[(first + place).clamp_max(bits + 63)], length)
    rest = first + zeros + 1
    values = torch.ones_like(positions)
    for place in range(int(length.clamp_max(40).max()) - 1 if bits else 0):
        inside = readable & (place < length - 1) & (length <= 40)
        values = torch.where(inside, values * 2 + padded[(rest + place).clamp_max(bits + 63)], values)
    ends = rest + length - 1
    readable &= (ends <= bits) & (length <= 40)
    return torch.where(readable, ends, bits), torch.where(readable, values, 0)


def _chain(following: Tensor, entries: int, bits: int) -> Tensor:
    """Return the first `entries` positions reached from 0 by following, `(entries,)`."""
    begins = torch.zeros(1, dtype=torch.long)
    jump = following
    while begins.numel() < entries:
        begins = torch.cat([begins, jump[begins]])  # in order: jump leads as many codes on as there are
        jump = jump[jump]
    return begins[:entries]

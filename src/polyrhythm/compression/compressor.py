"""Compressor: a pure function of a vector to bytes and back, and its properties.

    p = before(g, memory)     what is to be sent: the gradient, and what was kept back     p = g + e
    c = encode(p)             bytes, really packed; a layout of its own in each file
    d = decode(c)             what all receivers see
    after(p, d, memory)       what is kept back from now on                                e = p - d

Error feedback as in Seide et al., Interspeech 2014, and Karimireddy, Rebjock, Stich, Jaggi, ICML 2019, arXiv
1901.09847. A compressor is `biased` where the mean of `d` over its draws is not `p`: without feedback the difference is
lost for good, so that is refused.

Randomness is a function of the seed, the step, the rank and the section, never of a generator's history.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyrhythm.communication.message import MalformedMessage
from polyrhythm.errors import RequestError
from polyrhythm.specs import Config
from polyrhythm.training.linear_factors import Pair

COMPRESSORS = "polyrhythm.compression.compressors"
Route = Literal["auto", "gathered", "doubling", "split"]
"""Way of adding up sparse vectors among workers; see `streams`."""
SCALAR_BYTES = 4
"""Bytes of a scale, a count or an index."""

Memory = dict[str, Tensor]
"""Vectors that a compressor keeps from step to step, by name. Replaced, never changed in place."""

RESIDUAL = "residual"


@dataclass(frozen=True, slots=True)
class Place:
    """Origin of a vector to be compressed, known to sender and receivers alike.

    Attributes:
        rows: rows of the matrix; 1 where the vector is no matrix.
        columns: columns of that matrix; rows times columns are its numbers.
        dtype: dtype of the numbers.
        section: number of the section in the layout.
        step: step of the sender.
        rank: rank of the sender; 0 where the receivers cannot know it.
        scaler: a number that all ranks have agreed on, where the compressor `shares_scaler`.
        factor: result of `factor_of` for the sender's last payload; None: it has sent none, or is not known.
        pair: sufficient factors of the vector, where the compressor takes them `from_passes`.
    """

    rows: int
    columns: int
    dtype: torch.dtype = torch.float32
    section: int = 0
    step: int = 0
    rank: int = 0
    scaler: float | None = None
    factor: Tensor | None = None
    pair: Pair | None = None

    @property
    def numbers(self) -> int:
        """Numbers of the vector."""
        return self.rows * self.columns

    def draws(self, seed: int, *, shared: bool = False) -> torch.Generator:
        """Return the generator of this place's random numbers.

        Args:
            seed: seed of the compressor.
            shared: whether all ranks draw the same.
        """
        parts = (seed, self.step, self.section, -1 if shared else self.rank)
        mixed = 0x9E3779B97F4A7C15
        for part in parts:  # splitmix64, one round a part
            mixed = (mixed + (part + 1) * 0x9E3779B97F4A7C15) % (1 << 64)
            mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % (1 << 64)
            mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % (1 << 64)
            mixed ^= mixed >> 31
        return torch.Generator().manual_seed(mixed >> 1)


class Compressor(Config):
    """An algorithm that shrinks vectors.

    Attributes:
        biased: whether the mean of what is decoded, over its draws, is another vector than the one encoded.
        votes: whether the receivers take the sign of a sum for the whole result, as a majority does.
        own_momentum: whether it has a momentum of its own, so that the optimizer must have none.
        shares_scaler: whether ranks agree on a number before they encode; see `scaler`.
        factored: whether matrices travel as factors, which all ranks find together where they add up; see `power_sgd`.
        linear: whether all ranks choose the same numbers for their payloads, so that sums of payloads are
            payloads of sums.
        sparse: whether few of the numbers travel, so that sums of several are unions.
        from_passes: whether it takes what gradients are made of from forward and backward passes; see
            `training.linear_factors`.
        feedback: whether the compression error of a vector is added to the next one.
        per: whether each layer is compressed by itself, or all together.
        dense_below: tensors with fewer numbers travel as they are, as do all vectors (biases, batch norm).
        warm_up: steps at the start in which everything travels as it is; where the density is the choice, steps in
            which it falls to its value in five stages.
    """

    biased: ClassVar[bool] = True
    votes: ClassVar[bool] = False
    own_momentum: ClassVar[bool] = False
    shares_scaler: ClassVar[bool] = False
    factored: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    sparse: ClassVar[bool] = False
    from_passes: ClassVar[bool] = False

    feedback: bool = True
    per: str = Field(default="layer", pattern="^(layer|whole)$")
    dense_below: int = Field(default=256, ge=0)
    warm_up: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _right_feedback(self) -> Self:
        if self.is_biased and not self.feedback and not self.votes:
            raise RequestError(
                f"{self.name} without feedback never sends the omitted numbers: leave feedback out, or choose an "
                "unbiased compressor, such as qsgd or random_k(scaled=True)"
            )
        if not self.is_biased and self.feedback and self.loud:
            raise RequestError(
                f"{self.name} is unbiased, and adding its errors, which are larger than what it encodes, to the next "
                "vector would make them grow: leave feedback out"
            )
        return self

    @property
    def is_biased(self) -> bool:
        """Whether it is biased with these keys."""
        return self.biased

    @property
    def loud(self) -> bool:
        """Whether the expected squared error may exceed the squared norm of what is encoded."""
        return False

    @property
    def stream_route(self) -> Route | None:
        """Way of adding up sparse numbers among workers; None: the payload is not sparse."""
        return None

    @property
    def by_value(self) -> bool:
        """Whether the bytes of an encoded vector depend on its values or on the batch, and not on its shape alone."""
        return self.nbytes(Place(64, 64)) is None

    @property
    def works_in_parts(self) -> bool:
        """Whether parts of a vector, cut between layers, can be compressed one by one, with the same result."""
        return self.per == "layer" and not self.from_passes

    def is_dense_at(self, step: int) -> bool:
        """Return whether everything travels as it is at a step."""
        return step < self.warm_up

    def before(self, gradient: Tensor, memory: Memory) -> Tensor:
        """Return the vector to encode, `(n,)`.

        Args:
            gradient: `(n,)`, all sections; not changed.
            memory: entries may be replaced.
        """
        residual = memory.get(RESIDUAL) if self.feedback else None
        return gradient if residual is None else gradient + residual

    def after(self, vector: Tensor, decoded: Tensor, memory: Memory, dense: Tensor | None) -> None:
        """Take note of what was sent.

        Args:
            vector: result of `before`.
            decoded: vector that receivers decode, `(n,)`.
            memory: entries may be replaced.
            dense: `(n,)` bool, numbers that were sent uncompressed; None: none or all.
        """
        if self.feedback:
            memory[RESIDUAL] = vector - decoded

    def newest(self, gradient: Tensor) -> Tensor | None:
        """Return the part of the gradient that `encode` needs in addition to the vector; None: nothing."""
        return None

    def fits(self, rows: int, columns: int) -> bool:
        """Return whether a matrix is worth encoding; else it travels as it is."""
        return True

    def factor_of(self, payload: Tensor, place: Place) -> Tensor | None:
        """Return the factor in this payload from which the next encoding starts; None: nothing."""
        return None

    def left_numbers(self, place: Place) -> int:
        """Return how many numbers the left factor has, of all in a payload."""
        raise NotImplementedError

    def left(self, matrix: Tensor, place: Place) -> Tensor:
        """Return this rank's part, `(rows, r)`, of the left factor, where they are found together."""
        raise NotImplementedError

    def right(self, matrix: Tensor, left: Tensor) -> Tensor:
        """Return this rank's part, `(columns, r)`, of the right factor.

        Args:
            matrix: `(rows, columns)`.
            left: `(rows, r)`, what all ranks' parts add up to; becomes the left factor, in place.
        """
        raise NotImplementedError

    def entries(self, payload: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        """Return the indices, `(k,)` ascending, and the values, `(k,)`, of a payload, where it has a `stream_route`.

        Raises:
            MalformedMessage: no `encode` has made it.
        """
        raise NotImplementedError

    def from_rows(self, rows: float, place: Place) -> bool:
        """Return whether a layer's factors are to be broadcast, where the compressor takes them `from_passes`.

        Args:
            rows: rows of all workers' factors together.
            place: place of the layer.
        """
        raise NotImplementedError

    def scaler(self, vector: Tensor) -> float:
        """Return this rank's proposal for the number that all agree on, the largest of all proposals."""
        raise NotImplementedError

    def nbytes(self, place: Place) -> int | None:
        """Return the bytes of an encoded vector; None where they depend on its values."""
        raise NotImplementedError

    def encode(self, vector: Tensor, place: Place, newest: Tensor | None = None) -> Tensor:
        """Return the bytes, `(b,)` uint8, of a vector.

        Args:
            vector: `(n,)`, finite, contiguous, on the processor; n may be 0.
            place: place of it.
            newest: `(n,)`, the part of the vector that is new; None: all of it.
        """
        raise NotImplementedError

    def decode(self, payload: Tensor, place: Place) -> Tensor:
        """Return the vector, `(n,)` of the place's dtype, that bytes stand for.

        Raises:
            MalformedMessage: no `encode` has made them.
        """
        raise NotImplementedError

    def add_to(self, total: Tensor, payload: Tensor, place: Place) -> None:
        """Decode bytes and add the result to a vector, `(n,)`, in place."""
        total.add_(self.decode(payload, place))


def check_length(name: str, payload: Tensor, wanted: int | None) -> None:
    """Raise `MalformedMessage` unless a payload has the bytes that it must have."""
    if payload.numel() != wanted:
        raise MalformedMessage(f"{payload.numel()} bytes of {name} arrived where {wanted} were due")


def bytes_of(values: Tensor) -> Tensor:
    """Return a tensor's memory as bytes, `(b,)` uint8."""
    flat = values.contiguous().view(-1)
    if flat.numel() == 1:  # which is contiguous whatever its stride is
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)


def values_of(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as numbers of a type, in memory of their own."""
    return payload.clone().view(dtype)  # a slice need not begin where the type may


def aligned(matrix: Tensor) -> Tensor:
    """Return a matrix that begins at a multiple of 64 bytes, copied if need be: BLAS rounds by address."""
    return matrix.clone() if matrix.data_ptr() % 64 else matrix


def buckets_of(vector: Tensor, bucket: int) -> Tensor:
    """Return a vector in rows of a bucket each, `(buckets, bucket)` float32, padded with zeros."""
    missing = -vector.numel() % bucket
    vector = vector.float()
    return (torch.nn.functional.pad(vector, (0, missing)) if missing else vector).view(-1, bucket)


def bucket_lengths(numbers: int, bucket: int, device: torch.device) -> Tensor:
    """Return how many numbers each bucket has, `(buckets, 1)` float32 on a device: all but the last are full."""
    count = -(-numbers // bucket)
    lengths = torch.full((count, 1), float(bucket), device=device)
    if count:
        lengths[-1, 0] = numbers - (count - 1) * bucket
    return lengths

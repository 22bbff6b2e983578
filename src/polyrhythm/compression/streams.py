"""Sparse vectors that are added up on their way, as streams.

Renggli, Ashkboos, Aghagolzadeh, Alistarh, Hoefler, "SparCML: high-performance sparse communication for machine
learning", SC 2019, arXiv 1802.08021.

    sparse    u32 k │ k u32 indices, ascending │ k values       pays while  k < delta = n v / (4 + v),  v bytes a value
    dense     u32 2^32 - 1 │ n values                           from there on

    gathered  every rank sends its own to all others                                        (N-1) k (4+v) bytes
    doubling  ranks 1, 2, 4, … apart swap what they have, and merge                         log2 N messages
    split     every rank merges a slice of all, then all send their slice to all others     slices fill in to dense

Which one is chosen follows from the size, as if no two ranks had an index in common: `split` where it moves less,
`doubling` among many, else `gathered`. Each gives all ranks the same bits: sums of two are the same either way round,
and slices are merged in the order of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

import numpy as np
import torch
from torch import Tensor

from polyrhythm.communication.message import MalformedMessage, bare_payload
from polyrhythm.compression.compressor import SCALAR_BYTES, Route, bytes_of, values_of
from polyrhythm.compression.sparse import decode_sparse, encode_sparse, sparse_bytes

_DENSE = -1
_HALF_WORD_BYTES = 4
"""Bytes of a value that shares a word of 64 bits with its index."""
_FEW = 8
"""Workers that wait for each other's messages in one round sooner than in several."""


@dataclass(frozen=True)
class Stream:
    """A sparse vector, or a dense one.

    Attributes:
        size: size of the vector.
        values: `(k,)` of the indices, or `(size,)`.
        indices: `(k,)` int64, ascending; None: all.
    """

    size: int
    values: Tensor
    indices: Tensor | None

    @property
    def most_entries(self) -> int:
        """Up to how many entries sparse is smaller: delta."""
        value = self.values.element_size()
        return self.size * value // (SCALAR_BYTES + value)

    def merged(self, other: Stream) -> Stream:
        """Return the sum; dense where the union is beyond delta. The same bits as the other merged with this."""
        if self.indices is None or other.indices is None:
            return Stream(self.size, self.dense() + other.dense(), None)
        indices, values = _merged((self.indices, self.values), (other.indices, other.values))
        found = Stream(self.size, values, indices)
        return found if indices.numel() <= found.most_entries else Stream(self.size, found.dense(), None)

    def part(self, start: int, stop: int) -> Stream:
        """Return a slice of it."""
        if self.indices is None:
            return Stream(stop - start, self.values[start:stop], None)
        first, last = torch.searchsorted(self.indices, torch.tensor([start, stop])).tolist()
        return Stream(stop - start, self.values[first:last], self.indices[first:last] - start)

    def dense(self) -> Tensor:
        """Return the vector, `(size,)`."""
        if self.indices is None:
            return self.values
        whole = self.values.new_zeros(self.size)
        whole[self.indices] = self.values
        return whole

    def encode(self) -> Tensor:
        """Return it as bytes, `(b,)` uint8, in the layout above."""
        if self.indices is not None:
            return encode_sparse(self.indices, self.values)
        count = torch.tensor([_DENSE], dtype=torch.int32)
        return torch.cat([bytes_of(count), bytes_of(self.values)])

    def decoded(self, payload: Tensor) -> Stream:
        """Return the stream of as many numbers as this one that a payload encodes.

        Raises:
            MalformedMessage: the payload is invalid.
        """
        dtype = self.values.dtype
        if payload.numel() < SCALAR_BYTES:
            raise MalformedMessage("a stream arrived without its count")
        if int(values_of(payload[:SCALAR_BYTES], torch.int32)) != _DENSE:
            indices, values = decode_sparse(payload, self.size, dtype)
            return Stream(self.size, values, indices)
        if payload.numel() != SCALAR_BYTES + self.size * dtype.itemsize:
            raise MalformedMessage(
                f"{payload.numel()} bytes arrived for a dense stream of {self.size} numbers"
            )
        return Stream(self.size, values_of(payload[SCALAR_BYTES:], dtype), None)


def _merged(one: tuple[Tensor, Tensor], another: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of two sparse vectors, each its ascending indices and their values."""
    if one[1].element_size() == _HALF_WORD_BYTES and one[0].numel() + another[0].numel() > 0:
        return _merged_as_words(one, another)
    indices, values = torch.cat([one[0], another[0]]), torch.cat([one[1], another[1]])
    # Two ascending runs, which a stable sort merges in one pass where it looks for them, as numpy's does.
    order = torch.from_numpy(np.argsort(indices.numpy(), kind="stable"))
    indices, values = indices[order], values[order]
    twice = (indices[1:] == indices[:-1]).nonzero().view(-1)
    if twice.numel():
        values[twice] += values[twice + 1]
        once = torch.ones_like(indices, dtype=torch.bool)
        once[twice + 1] = False
        indices, values = indices[once], values[once]
    return indices, values


def _merged_as_words(one: tuple[Tensor, Tensor], another: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """As `_merged`, with each index and the bits of its value in one word, so that both move together.

    word     value, 32 bits │ index, 32 bits        the index in the higher half, so words are ordered by it
    """
    first, both = one[0].numel(), one[0].numel() + another[0].numel()
    words = np.empty(both, dtype="<i8")
    halves = words.view("<i4").reshape(both, 2)
    for place, (indices, values) in ((slice(0, first), one), (slice(first, both), another)):
        halves[place, 0] = values.view(torch.int32).numpy()
        halves[place, 1] = indices.numpy()
    words.sort(kind="stable")  # merges two ascending runs in one pass
    found = halves[:, 1]
    twice = np.flatnonzero(found[1:] == found[:-1])
    if twice.size:
        sums = torch.from_numpy(halves[:, 0].copy()).view(one[1].dtype)
        halves[twice, 0] = (sums[twice] + sums[twice + 1]).view(torch.int32).numpy()
        halves = np.delete(words, twice + 1).view("<i4").reshape(-1, 2)
    bits = torch.from_numpy(np.ascontiguousarray(halves[:, 0]))
    return torch.from_numpy(halves[:, 1].astype(np.int64)), bits.view(one[1].dtype)


@dataclass(frozen=True)
class CountedStream(Stream):
    """A stream of a dry run: the number of entries, if no two had an index in common.

    Attributes:
        numbers: numbers of the true vector, for which a proxy stands.
        entries: number of entries.
    """

    numbers: int
    entries: int

    def merged(self, other: Stream) -> CountedStream:
        assert isinstance(other, CountedStream), "streams of a dry run meet only such"
        return CountedStream(self.size, self.values, None, self.numbers, self.entries + other.entries)

    def part(self, start: int, stop: int) -> CountedStream:
        first, last = (end * self.numbers // self.size for end in (start, stop))
        entries = self.entries * stop // self.size - self.entries * start // self.size
        return CountedStream(stop - start, self.values[start:stop], None, last - first, entries)

    def encode(self) -> Tensor:
        dtype = self.values.dtype
        dense = SCALAR_BYTES + self.numbers * dtype.itemsize
        return bare_payload(min(dense, sparse_bytes(self.entries, dtype)))

    def decoded(self, payload: Tensor) -> CountedStream:
        entry = SCALAR_BYTES + self.values.element_size()
        entries = min(self.numbers, (payload.numel() - SCALAR_BYTES) // entry)
        return CountedStream(self.size, self.values, None, self.numbers, entries)


def port_bytes(route: str, ranks: int, payload_bytes: float, whole_bytes: float) -> float:
    """Return the bytes that a rank sends, if no two have an index in common.

    Args:
        route: route other than `auto`.
        ranks: number of ranks.
        payload_bytes: size in bytes of the payload of one rank's entries.
        whole_bytes: bytes of a dense vector.
    """
    if route == "gathered":
        return (ranks - 1) * payload_bytes
    if route == "doubling":
        rounds = range(max(0, ranks.bit_length() - 1))
        folded = 0 if log2(ranks).is_integer() else min(ranks * payload_bytes, whole_bytes)
        return folded + sum(min((1 << turn) * payload_bytes, whole_bytes) for turn in rounds)
    return (ranks - 1) / ranks * (payload_bytes + min(ranks * payload_bytes, whole_bytes))


def route_of(route: Route, ranks: int, payload_bytes: float, whole_bytes: float) -> Route:
    """Return the route that `auto` stands for; see `port_bytes`."""
    if route != "auto":
        return route
    gathered, split = (port_bytes(each, ranks, payload_bytes, whole_bytes) for each in ("gathered", "split"))
    if split < gathered:
        return "split"
    return "doubling" if ranks > _FEW else "gathered"

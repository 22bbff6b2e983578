"""Sparse vectors as bytes: which numbers, and their values.

    u32 k │ k u32 indices, ascending │ k values        little endian, without gaps

and the choice of the k largest, exactly and with few passes over memory: a sample gives a bound below which the k-th
largest surely lies, and only those above the bound are sorted. Where the sample was wrong all are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyrhythm.communication.message import MalformedMessage
from polyrhythm.compression.compressor import SCALAR_BYTES, bytes_of, values_of

MOST_NUMBERS = 1 << 31
"""Limit of a vector with 32-bit indices, one bit of them a sign."""
_SAMPLE = 1 << 14
_SAMPLED_FROM = 1 << 17


def sparse_bytes(entries: int, dtype: torch.dtype) -> int:
    """Return the bytes of `entries` entries."""
    return SCALAR_BYTES + entries * (SCALAR_BYTES + dtype.itemsize)


def count_of(numbers: int, density: float) -> int:
    """Return how many numbers travel at a density in (0, 1]: one at least, where there are any."""
    return min(numbers, max(1, round(numbers * density)))


def encode_sparse(indices: Tensor, values: Tensor) -> Tensor:
    """Return entries as bytes; indices, `(k,)`, ascend."""
    count = torch.full((1,), indices.numel(), dtype=torch.int32, device=indices.device)
    return torch.cat([bytes_of(count), bytes_of(indices.to(torch.int32)), bytes_of(values)])


def decode_sparse(payload: Tensor, numbers: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the indices, `(k,)` int64, and values, `(k,)`, of a sparse vector of `numbers` numbers.

    Raises:
        MalformedMessage: another length, or indices that do not ascend within the vector.
    """
    if payload.numel() < SCALAR_BYTES:
        raise MalformedMessage("sparse entries arrived without their count")
    count = int(values_of(payload[:SCALAR_BYTES], torch.int32))
    if not 0 <= count <= numbers or payload.numel() != sparse_bytes(count, dtype):
        raise MalformedMessage(f"{payload.numel()} bytes arrived for {count} entries of {numbers} numbers")
    middle = SCALAR_BYTES * (1 + count)
    indices = values_of(payload[SCALAR_BYTES:middle], torch.int32).long()
    check_ascending(indices, numbers)
    return indices, values_of(payload[middle:], dtype)


def check_ascending(indices: Tensor, numbers: int) -> None:
    """Raise `MalformedMessage` unless indices, `(k,)`, ascend and lie in a vector of `numbers` numbers."""
    if indices.numel() and not (
        int(indices[0]) >= 0 and int(indices[-1]) < numbers and bool((indices[1:] > indices[:-1]).all())
    ):
        raise MalformedMessage("sparse entries arrived out of order, or beyond their vector")


def largest(vector: Tensor, count: int) -> Tensor:
    """Return the indices, ascending, of the numbers of largest magnitude; of equal ones the first.

    Args:
        vector: `(n,)`, finite.
        count: number of indices, at most n.
    """
    numbers = vector.numel()
    if count >= numbers:
        return torch.arange(numbers, device=vector.device)
    magnitudes = vector.abs()
    candidates = _candidates(magnitudes, count)
    among = magnitudes if candidates is None else magnitudes[candidates]
    bound = torch.topk(among, count, sorted=False).values.min()
    above = (among > bound).nonzero().view(-1)
    equal = (among == bound).nonzero().view(-1)[: count - above.numel()]
    chosen = torch.cat([above, equal]).sort().values
    return chosen if candidates is None else candidates[chosen]


def _candidates(magnitudes: Tensor, count: int) -> Tensor | None:
    """Return the indices of some, among which the `count` largest are; None: nothing is known."""
    numbers = magnitudes.numel()
    if numbers < _SAMPLED_FROM or count > numbers // 4:
        return None
    sample = magnitudes[:: numbers // _SAMPLE]
    expected = count / numbers * sample.numel()
    place = min(sample.numel(), int(expected + 4 * expected**0.5) + 4)
    bound = torch.topk(sample, place, sorted=False).values.min()
    found = (magnitudes >= bound).nonzero().view(-1)
    return found if found.numel() >= count else None

"""Codes of a few bits each, packed into bytes without gaps: least significant bit first, padded with zeros.

    codes of 3 bits     a0 a1 a2  b0 b1 b2  c0 c1 c2 …        a0 the lowest bit of the first code
    bytes               a0 a1 a2 b0 b1 b2 c0 c1 | c2 …        a0 the lowest bit of the first byte

Eight codes of any width fill whole bytes, so eight are packed at once in a word of 64 bits, in which neighbors are
joined three times:

    0000aaa 0000bbb 0000ccc …  ─▶  00000000bbbaaa …  ─▶  …  ─▶  hhhgggfffeeedddcccbbbaaa
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyrhythm.communication.message import MalformedMessage

WIDEST_BITS = 8
_TOGETHER = 8
_MERGED = ((8, 1), (16, 2), (32, 4))
"""Bits of a lane, and codes that a lane holds, before each joining."""
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Types that eight codes of some widths fill, moved at once and not byte by byte."""


def packed_bytes(numbers: int, bits: int) -> int:
    """Return the bytes of `numbers` codes of `bits` bits."""
    return -(-numbers * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes as bytes.

    Args:
        codes: `(n,)`, uint8 or bool, each below `2 ** bits`.
        bits: bits of each, 1 to 8.

    Returns:
        `(packed_bytes(n, bits),)`, uint8.
    """
    numbers = codes.numel()
    codes = codes.view(torch.uint8) if codes.dtype is torch.bool else codes
    if bits == WIDEST_BITS:
        return codes.clone()
    if numbers % _TOGETHER:
        codes = torch.nn.functional.pad(codes, (0, -numbers % _TOGETHER))
    # A view needs memory that begins at a whole word, which a slice's may not.
    words = (codes if codes.storage_offset() % _TOGETHER == 0 else codes.clone()).view(torch.int64)
    for lane, held in _MERGED:
        width = bits * held
        upper = (words >> (lane - width)).bitwise_and_(_mask(2 * lane, width, 2 * width))
        words = (words & _mask(2 * lane, 0, width)).bitwise_or_(upper)
    if bits in _WHOLE:
        first = words.view(_WHOLE[bits]).view(-1, _TOGETHER // bits)[:, 0]
        packed = first.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    else:
        packed = words.view(torch.uint8).view(-1, _TOGETHER)[:, :bits].reshape(-1)
    return packed[: packed_bytes(numbers, bits)]


def unpack(payload: Tensor, numbers: int, bits: int) -> Tensor:
    """Return the codes, `(numbers,)`, uint8, that `pack` was given.

    Raises:
        MalformedMessage: the payload is of another length.
    """
    if payload.numel() != packed_bytes(numbers, bits):
        raise MalformedMessage(
            f"{payload.numel()} bytes arrived for {numbers} codes of {bits} bits, which take "
            f"{packed_bytes(numbers, bits)}"
        )
    if bits == WIDEST_BITS:
        return payload.clone()
    groups = -(-numbers // _TOGETHER)
    if payload.numel() < groups * bits:
        payload = torch.nn.functional.pad(payload, (0, groups * bits - payload.numel()))
    words = payload.new_zeros(groups * _TOGETHER).view(torch.int64)
    if bits in _WHOLE and payload.storage_offset() % bits == 0:
        words.view(_WHOLE[bits]).view(-1, _TOGETHER // bits)[:, 0] = payload.view(_WHOLE[bits])
    else:
        words.view(torch.uint8).view(-1, _TOGETHER)[:, :bits] = payload.view(groups, bits)
    for lane, held in reversed(_MERGED):
        width = bits * held
        upper = (words << (lane - width)).bitwise_and_(_mask(2 * lane, lane, lane + width))
        words = words.bitwise_and_(_mask(2 * lane, 0, width)).bitwise_or_(upper)  # it is its own memory
    return words.view(torch.uint8)[:numbers]


def _mask(lane: int, start: int, stop: int) -> int:
    """Return a word of 64 bits, as a signed number, with bits `start` to `stop` of each lane set."""
    one = (1 << stop) - (1 << start)
    whole = sum(one << place for place in range(0, 64, lane))
    return whole - (1 << 64) if whole >= 1 << 63 else whole

"""Packets of links inside a host."""

from __future__ import annotations

import pytest

from polyrhythm.communication.message import HEADER_BYTES, MalformedMessage
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.shared_memory.links import (
    FRAME_BYTES,
    HELLO_BYTES,
    IN_CHUNKS,
    Card,
    decode_hello,
    decode_place,
    encode_hello,
    encode_place,
)


def test_a_frame_is_a_header_and_sixteen_bytes() -> None:
    assert FRAME_BYTES == HEADER_BYTES + 16
    for place, forgotten in ((0, 0), (63, (1 << 64) - 1), (IN_CHUNKS, 5)):
        packed = encode_place(place, forgotten)
        assert len(packed) == 16
        assert decode_place(memoryview(b"\0" * HEADER_BYTES + packed)) == (place, forgotten)


def test_a_hello_is_token_rank_and_generation() -> None:
    token = "00ff" * 8
    packed = encode_hello(token, Peer(258, 3))
    assert packed == bytes.fromhex(token) + b"\x02\x01" + b"\0" * 6 + b"\x03" + b"\0" * 7
    assert decode_hello(packed) == (token, Peer(258, 3))


@pytest.mark.parametrize("length", [0, HELLO_BYTES - 1, HELLO_BYTES + 1])
def test_a_hello_of_another_length_is_malformed(length: int) -> None:
    with pytest.raises(MalformedMessage, match=f"began with {length} bytes, not 32"):
        decode_hello(b"\0" * length)


def test_a_card_travels_as_text_and_an_empty_text_is_none() -> None:
    card = Card("a host", "an address", "a token")
    assert Card.from_text(card.to_text()) == card
    assert Card.from_text("") is None

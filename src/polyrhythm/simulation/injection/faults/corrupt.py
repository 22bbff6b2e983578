"""Corrupt: one bit of a message is flipped.

A header that makes no sense any more breaks the link, as it does in reality; one that still does arrives with the wrong
number. The checksums of TCP and Ethernet find nearly all such errors; what is simulated is one that they miss.
"""

from __future__ import annotations

from random import Random
from typing import Literal

import torch

from polyrhythm.communication.message import (
    HEADER_BYTES,
    MalformedMessage,
    Message,
    decode_header,
    encode_header,
)
from polyrhythm.simulation.injection.fault import MessageFault, Passage


class Corrupt(MessageFault):
    """A random bit of chosen messages is flipped.

    Attributes:
        part: part of the message: payload (messages without one stay as they are) or header.
    """

    part: Literal["payload", "header"] = "payload"

    def happen(self, passage: Passage, random: Random) -> None:
        parcel = passage.parcel
        if self.part == "payload":
            _flip_in_payload(parcel.message, random)
            return
        header = bytearray(encode_header(parcel.message, parcel.context))
        _flip(header, random.randrange(8 * HEADER_BYTES))
        try:
            parcel.context, parcel.message = _read(bytes(header), parcel.message)
        except MalformedMessage:
            passage.malformed = True


def _flip(raw: bytearray, bit: int) -> None:
    raw[bit // 8] ^= 1 << bit % 8


def _flip_in_payload(message: Message, random: Random) -> None:
    """Change the receiver's own copy."""
    if message.tensor is not None and message.tensor.numel():
        raw = message.tensor.view(torch.uint8)
        bit = random.randrange(8 * raw.numel())
        raw[bit // 8] ^= 1 << bit % 8


def _read(header: bytes, sent: Message) -> tuple[int, Message]:
    """Return the context and message of a header, with the payload as it was sent.

    Raises:
        MalformedMessage: the header is invalid, or announces another payload length, so that the stream loses
            sync.
    """
    announced = int.from_bytes(header[16:24], "little", signed=True)  # read first: it may be huge
    if announced != (0 if sent.tensor is None else sent.tensor.numel()):
        raise MalformedMessage(f"a payload of {announced} elements was announced, and another arrived")
    context, read = decode_header(header)
    if read.tensor is None and sent.tensor is None:
        return context, read
    if read.tensor is None or sent.tensor is None or read.tensor.dtype != sent.tensor.dtype:
        raise MalformedMessage("a payload of another type was announced than arrived")
    read.tensor.copy_(sent.tensor)
    return context, read

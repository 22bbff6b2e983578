"""What travels over the socket of a link between two ranks of a host: packets, kept apart by the kernel.

    hello      token | rank | incarnation                 first, from the sender
    frame      header | place of the payload | forgotten  then one a message; a short payload follows in the packet
    chunk      bytes of a payload                         after a frame that announces them
    number     one byte                                   back from the receiver: this slot is free, or goodbye

The header is that of every message; `forgotten` is a mask of slots that will not be used again.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass

from polyrhythm.communication.message import HEADER_BYTES, MalformedMessage
from polyrhythm.communication.transports.membership import Peer

IN_PACKET, IN_CHUNKS = -1, -2
"""Places of a payload; all others are numbers of slots."""

GOODBYE = 255
"""Instead of a slot's number."""

TOKEN_BYTES = 16
MOST_INLINE_BYTES = 1 << 14
CHUNK_BYTES = 1 << 16

_PLACE = struct.Struct("<qQ")  # place, mask of forgotten slots
_HELLO = struct.Struct(f"<{TOKEN_BYTES}sqq")

FRAME_BYTES = HEADER_BYTES + _PLACE.size
HELLO_BYTES = _HELLO.size


@dataclass(frozen=True)
class Card:
    """Where a rank listens for the others of its host.

    Attributes:
        host: key of its host.
        address: of its socket, an abstract one: it has no file, and is gone with its process.
        token: hexadecimal; whoever connects must know it.
    """

    host: str
    address: str
    token: str

    def to_text(self) -> str:
        """Gives it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Card | None:
        """Reads what `to_text` gave; None for the empty text of a rank that does not listen."""
        return cls(**json.loads(text)) if text else None


def encode_place(place: int, forgotten: int) -> bytes:
    """Packs what follows the header in a frame."""
    return _PLACE.pack(place, forgotten)


def decode_place(frame: memoryview) -> tuple[int, int]:
    """Unpacks place and forgotten slots from a frame of `FRAME_BYTES` bytes."""
    place, forgotten = _PLACE.unpack_from(frame, HEADER_BYTES)
    return place, forgotten


def encode_hello(token: str, source: Peer) -> bytes:
    """Packs the first packet of a link."""
    return _HELLO.pack(bytes.fromhex(token), *source)


def decode_hello(packet: bytes) -> tuple[str, Peer]:
    """Unpacks the first packet of a link.

    Raises:
        MalformedMessage: it is something else.
    """
    if len(packet) != HELLO_BYTES:
        raise MalformedMessage(f"a link began with {len(packet)} bytes, not {HELLO_BYTES}")
    token, rank, incarnation = _HELLO.unpack(packet)
    return token.hex(), Peer(rank, incarnation)

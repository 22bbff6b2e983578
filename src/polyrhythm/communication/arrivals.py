"""Senders of a rank's messages, in order: the only difference between two asynchronous runs.

A rank that receives from any rank takes the first message. Which message that was is the only thing in a run
that depends on time, so a list of senders is enough to replay the run. Next to each sender is a check of its
message, so that a replay can find the first message that differs.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from base64 import b64decode, b64encode
from struct import Struct
from typing import Any

import torch

from polyrhythm.communication.message import Kind, Message

_FACTS = Struct("<IB?qqdd")  # source, kind, stop, version, step, weight, learning rate
_SAMPLED_BYTES = 256
_MOST_MESSAGES = 1 << 28
_SENDER_TYPE, _CHECK_TYPE = "I", "H"


class Arrivals:
    """The messages that a rank received when any sender was allowed.

    A request for a checkpoint is not recorded: it changes nothing, and a replay writes no checkpoints.

    Attributes:
        sources: senders of the messages, in order of receipt.
        checks: checks of each message, 16 bits.
    """

    def __init__(self) -> None:
        self.sources = array(_SENDER_TYPE)
        self.checks = array(_CHECK_TYPE)

    def __len__(self) -> int:
        return len(self.sources)

    def note(self, source: int, message: Message) -> None:
        """Add a message that has been taken."""
        if message.kind is not Kind.CHECKPOINT:
            self.sources.append(source)
            self.checks.append(check(source, message))

    def to_json(self) -> dict[str, str]:
        """Return the list as JSON-able texts: compressed little-endian numbers in base 64."""
        return {"sources": _packed(self.sources), "checks": _packed(self.checks)}

    @classmethod
    def from_json(cls, value: Any) -> Arrivals:
        """Rebuild it from the result of `to_json`; raise `ValueError` if that is malformed."""
        read = cls()
        try:
            read.sources = _unpacked(value["sources"], _SENDER_TYPE)
            read.checks = _unpacked(value["checks"], _CHECK_TYPE)
        except (KeyError, TypeError, zlib.error) as error:
            raise ValueError(f"a list of arrivals is damaged ({error})") from None
        if len(read.sources) != len(read.checks):
            raise ValueError(f"{len(read.sources)} arrivals have {len(read.checks)} checks")
        return read


def check(source: int, message: Message) -> int:
    """Return 16 bits that depend on all facts of a message and on a sample of its payload.

    The sample keeps the cost at a few microseconds, however long the payload is. Parameters that differ anywhere make
    the gradients that are computed from them differ nearly everywhere, so it loses little.
    """
    facts = _FACTS.pack(
        source,
        message.kind,
        message.stop,
        message.version,
        message.step,
        message.weight,
        message.learning_rate,
    )
    if message.tensor is None:
        return zlib.crc32(facts) & 0xFFFF
    raw = message.tensor.detach().cpu().view(torch.uint8).numpy()
    stride = (len(raw) // _SAMPLED_BYTES) | 1  # odd, so that all bytes of numbers have their turn
    return zlib.crc32(raw[::stride].tobytes(), zlib.crc32(facts)) & 0xFFFF


def _packed(values: array[int]) -> str:
    return b64encode(zlib.compress(_little_endian(values).tobytes())).decode()


def _unpacked(text: str, kind: str) -> array[int]:
    values = array(kind)
    most = _MOST_MESSAGES * values.itemsize
    unpacker = zlib.decompressobj()
    raw = unpacker.decompress(b64decode(text, validate=True), most)
    if not unpacker.eof:
        raise ValueError("a list of arrivals is cut short, or too long")
    values.frombytes(raw)
    return _little_endian(values)


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values

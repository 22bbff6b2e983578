"""What travels on a connection between two members: a header of 32 bytes, and a run of a vector's bytes."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from zlib import crc32

from torch import Tensor

from polyrhythm.errors import RunError

_HEADER = struct.Struct("<IBBxxIIQQ")  # number, phase, bytes of an element, kind, bytes, total bytes, offset
HEADER_BYTES = _HEADER.size


class Phase(enum.IntEnum):
    """Why a frame travels."""

    PART = 1  # one member's, to be added up by the receiver
    SUM = 2  # of all members


@dataclass(frozen=True, slots=True)
class Shape:
    """What all members must agree about.

    Attributes:
        total_bytes: of the whole vector.
        element_bytes: of one number.
        kind: tells dtypes apart.
    """

    total_bytes: int
    element_bytes: int
    kind: int

    @classmethod
    def of(cls, vector: Tensor) -> Shape:
        """Describes a vector."""
        return cls(vector.nbytes, vector.element_size(), crc32(str(vector.dtype).encode()))


@dataclass(frozen=True, slots=True)
class Frame:
    """A header.

    Attributes:
        number: of the collective, counted by all members alike.
        phase: why it travels.
        shape: of the vector.
        offset: bytes from the beginning of the slice that it is a run of.
        nbytes: that follow.
    """

    number: int
    phase: Phase
    shape: Shape
    offset: int
    nbytes: int

    def encode(self) -> bytes:
        """Gives `HEADER_BYTES` bytes."""
        shape = self.shape
        return _HEADER.pack(
            self.number,
            self.phase,
            shape.element_bytes,
            shape.kind,
            self.nbytes,
            shape.total_bytes,
            self.offset,
        )

    @classmethod
    def decode(cls, content: bytes | bytearray | memoryview) -> Frame:
        """Reads a header.

        Raises:
            RunError: it is none.
        """
        number, phase, element_bytes, kind, nbytes, total_bytes, offset = _HEADER.unpack(content)
        if (
            phase not in (Phase.PART, Phase.SUM)
            or not 0 < nbytes <= total_bytes
            or element_bytes not in (1, 2, 4, 8, 16)
        ):
            raise RunError("a member of a collective sent what is no part of one")
        return cls(number, Phase(phase), Shape(total_bytes, element_bytes, kind), offset, nbytes)

"""What a link between two ranks of a host is made of: packets on a socket, and slots of shared memory.

The kernel keeps the packets apart:

    hello    token | rank | incarnation                 first, from the sender
    frame    header | place of the payload | forgotten  one a message; a short payload follows in the packet
    chunk    bytes of a payload                         after a frame that announces them
    number   one byte                                   back from the receiver: this slot is free, or goodbye

The header is that of every message; `forgotten` is a mask of slots that will not be used again. Slots are
pieces of shared memory that carry payloads from one rank to the other:

    sender                                               receiver
    LendingSlots.lend ── number, descriptor if new ──▶  BorrowedSlots.tensor: a tensor in the slot itself
        ▲ copies the payload in                            │
        └──────────── number, back on the socket ◀─────────┘ when nobody holds the tensor any more

A slot is a file without a name (memfd): nothing is left behind, however its ranks end. Its pages are
allocated before they are used and sealed against shrinking, so no access can fail.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

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
        token: hexadecimal; a process that connects must know it.
    """

    host: str
    address: str
    token: str

    def to_text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Card | None:
        """Read what `to_text` returned; None for the empty text of a rank that does not listen."""
        return cls(**json.loads(text)) if text else None


def encode_place(place: int, forgotten: int) -> bytes:
    """Pack what follows the header in a frame."""
    return _PLACE.pack(place, forgotten)


def decode_place(frame: memoryview) -> tuple[int, int]:
    """Unpack place and forgotten slots from a frame of `FRAME_BYTES` bytes."""
    place, forgotten = _PLACE.unpack_from(frame, HEADER_BYTES)
    return place, forgotten


def encode_hello(token: str, source: Peer) -> bytes:
    """Pack the first packet of a link."""
    return _HELLO.pack(bytes.fromhex(token), *source)


def decode_hello(packet: bytes) -> tuple[str, Peer]:
    """Unpack the first packet of a link.

    Raises:
        MalformedMessage: it is something else.
    """
    if len(packet) != HELLO_BYTES:
        raise MalformedMessage(f"a link began with {len(packet)} bytes, not {HELLO_BYTES}")
    token, rank, incarnation = _HELLO.unpack(packet)
    return token.hex(), Peer(rank, incarnation)


MOST_SLOTS = 64
"""So many fit into the mask of a frame."""

_SMALLEST_BYTES = 1 << 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SEAL") else 0


@dataclass(slots=True)
class Slot:
    """One slot, at its sender.

    Attributes:
        number: among those of its link.
        memory: shared with the receiver.
        descriptor: of the file, for the receiver; closed by its sender, and then -1.
    """

    number: int
    memory: mmap.mmap
    descriptor: int

    def fill(self, payload: Tensor) -> None:
        """Copy a tensor of shape `(n,)` in."""
        place = torch.frombuffer(self.memory, dtype=payload.dtype, count=payload.numel())
        place.copy_(payload)

    def close_descriptor(self) -> None:
        """Close the file; its memory stays as long as a process has it mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass(slots=True)
class LendingSlots:
    """The sender's slots of one link. Grows on demand; knows nothing of sockets.

    Attributes:
        most_bytes: all slots together are never larger.
        refused: why the system has no more shared memory, once it has said so.
    """

    most_bytes: int
    refused: OSError | None = None
    _slots: dict[int, Slot] = field(default_factory=dict)
    _free: set[int] = field(default_factory=set)
    _forgotten: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def lend(self, size: int) -> Slot | None:
        """Return a free slot of at least `size` bytes, made if need be, or None where the bound forbids it."""
        with self._lock:
            fitting = [number for number in self._free if len(self._slots[number].memory) >= size]
            if fitting:
                number = min(fitting, key=lambda number: len(self._slots[number].memory))
                self._free.remove(number)
                return self._slots[number]
            return self._make(_rounded(size))

    def take_back(self, number: int) -> None:
        """Note that the receiver no longer needs a slot."""
        with self._lock:
            if number in self._slots:
                self._free.add(number)

    @property
    def forgotten(self) -> int:
        """The slots that the receiver must still be told to unmap, as a mask of their numbers."""
        return self._forgotten

    def told(self, mask: int) -> None:
        """Note that the receiver has been told."""
        with self._lock:
            self._forgotten &= ~mask

    def close(self) -> None:
        """Release all memory that the receiver does not hold."""
        with self._lock:
            for slot in self._slots.values():
                slot.close_descriptor()
            self._slots.clear()
            self._free.clear()

    def _make(self, size: int) -> Slot | None:
        if size > self.most_bytes or self.refused is not None:
            return None
        while self._free and (self._total() + size > self.most_bytes or len(self._slots) == MOST_SLOTS):
            number = self._free.pop()
            del self._slots[number]
            self._forgotten |= 1 << number
        if self._total() + size > self.most_bytes or len(self._slots) == MOST_SLOTS:
            return None
        try:
            descriptor = shared_file(size)
            memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            self.refused = error
            return None
        number = next(number for number in range(MOST_SLOTS) if number not in self._slots)
        self._slots[number] = Slot(number, memory, descriptor)
        return self._slots[number]

    def _total(self) -> int:
        return sum(len(slot.memory) for slot in self._slots.values())


class BorrowedSlots:
    """The receiver's view of the slots of one link.

    Args:
        give_back: called with a slot's number when nobody holds its tensor any more, from whichever thread.
    """

    def __init__(self, give_back: Callable[[int], None]) -> None:
        self._give_back = give_back
        self._memories: dict[int, mmap.mmap] = {}
        self._lent: dict[int, weakref.ref[memoryview]] = {}

    def add(self, number: int, descriptor: int) -> None:
        """Map a new slot.

        Raises:
            MalformedMessage: it is a file whose pages could vanish.
        """
        if not 0 <= number < MOST_SLOTS:
            raise MalformedMessage(f"a slot came as number {number}, where there are {MOST_SLOTS}")
        try:
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK == 0:
                raise MalformedMessage("a slot came that is not sealed")
            size = os.fstat(descriptor).st_size
            self._memories[number] = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except (OSError, ValueError) as error:
            raise MalformedMessage(f"a slot came that cannot be mapped: {error}") from None

    def forget(self, mask: int) -> None:
        """Release slots that will not be used again."""
        for number in [number for number in self._memories if mask >> number & 1]:
            del self._memories[number]

    def tensor(self, number: int, elements: int, dtype: torch.dtype) -> Tensor:
        """Return the payload in a slot, shape `(elements,)`; the slot is given back when its last view is dropped.

        Raises:
            MalformedMessage: no such slot, too small, or its last payload is still held.
        """
        memory = self._memories.get(number)
        size = elements * dtype.itemsize
        if memory is None or not 0 < size <= len(memory) or number in self._lent:
            raise MalformedMessage(
                f"a payload of {size} bytes was announced in slot {number}, which cannot be"
            )
        view = memoryview(memory)[:size]  # the tensor's storage holds it, and nobody else does
        self._lent[number] = weakref.ref(view, lambda _: self._end(number))
        return torch.frombuffer(view, dtype=dtype, count=elements)

    def _end(self, number: int) -> None:
        del self._lent[number]
        with suppress(OSError):  # the sender has left and needs it no more
            self._give_back(number)


def shared_file(size: int) -> int:
    """Make a file of memory that has no name, all of it allocated, and return its descriptor.

    Raises:
        OSError: there is no such thing here, or no memory.
    """
    if not _SEALS or not hasattr(os, "memfd_create"):
        raise OSError("this system has no memory files (memfd)")
    descriptor = os.memfd_create("polyrhythm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)  # else the first access to a page could end the process
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _rounded(size: int) -> int:
    """Round a size up by at most an eighth, so that payloads of about the same size share slots."""
    unit = max(_SMALLEST_BYTES, 1 << max(0, size.bit_length() - 4))
    return -(-size // unit) * unit

"""Links between ranks of one host: packets on a socket, and slots of shared memory for their payloads.

The kernel keeps the packets apart:

    hello    token | rank | generation                 first, from the sender
    frame    header | place of the payload | forgotten  one a message; a short payload follows in the packet
    chunk    bytes of a payload                         after a frame that announces them
    number   one byte                                   back from the receiver: this slot is free, or goodbye

The header is that of every message; `forgotten` is a mask of slots that will not be used again. Slots are
pieces of shared memory that carry payloads from one rank to the other:

    sender                                               receiver
    LendingSlots.lend ── number, descriptor if new ──▶  BorrowedSlots.tensor: a tensor in the slot itself
        ▲ copies the payload in                            │
        └──────────── number, back on the socket ◀─────────┘ when nothing holds the tensor any more

A slot is a file without a name (memfd): nothing remains of it, however its ranks end. Its pages are allocated
before they are used and sealed against shrinking, so no access can fail.

Tensors in memory that the sender lends (`lent_memory`) are not copied into a slot: the receiver gets their
place in a segment, which has a number among the slots, and returns it in the same way, once for each message.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.message import (
    HEADER_BYTES,
    Kind,
    MalformedMessage,
    Message,
    Reason,
    RefusedMessage,
    decode_header,
    encode_header,
)
from polyrhythm.communication.transports.membership import Membership, Peer
from polyrhythm.communication.transports.shared_memory.lent_memory import (
    LentSegments,
    Segment,
    shared_file,
)
from polyrhythm.communication.transports.sockets import PacketSocket, accept_next, hang_up
from polyrhythm.errors import PeerLost, RunError

IN_PACKET, IN_CHUNKS = -1, -2
"""Places of a payload; all others are those of slots and segments, see `place_in`."""

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
    """Address of a rank's listener for the others of its host.

    Attributes:
        host: key of its host.
        address: address of its socket, an abstract one: it has no file, and is gone with its process.
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
        """Rebuild it from the result of `to_text`; None for the empty text of a rank that does not listen."""
        return cls(**json.loads(text)) if text else None


def encode_place(place: int, forgotten: int) -> bytes:
    """Pack what follows the header in a frame."""
    return _PLACE.pack(place, forgotten)


def decode_place(frame: memoryview) -> tuple[int, int]:
    """Unpack place and forgotten slots from a frame of `FRAME_BYTES` bytes."""
    place, forgotten = _PLACE.unpack_from(frame, HEADER_BYTES)
    return place, forgotten


def place_in(number: int, start: int) -> int:
    """Return the place of a payload that begins at byte `start` of a segment."""
    return start << _START_BITS | _IN_SEGMENT | number


def encode_hello(token: str, source: Peer) -> bytes:
    """Pack the first packet of a link."""
    return _HELLO.pack(bytes.fromhex(token), *source)


def decode_hello(packet: bytes) -> tuple[str, Peer]:
    """Unpack the first packet of a link; raise `MalformedMessage` if it is something else."""
    if len(packet) != HELLO_BYTES:
        raise MalformedMessage(f"a link began with {len(packet)} bytes, not {HELLO_BYTES}")
    token, rank, generation = _HELLO.unpack(packet)
    return token.hex(), Peer(rank, generation)


MOST_SLOTS = 64
"""Bits of a frame's mask, segments included."""

_SMALLEST_BYTES = 1 << 16
_IN_SEGMENT, _START_BITS = MOST_SLOTS, 8
"""Layout of a place: flag of segments, above the number; first bit of the start."""


@dataclass(slots=True)
class Slot:
    """One slot, at its sender.

    Attributes:
        number: index of the slot within its link.
        memory: mapped memory, shared with the receiver.
        descriptor: file descriptor of the file, for the receiver; closed by its sender, and then -1.
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
class Loan:
    """A segment, as the receiver of one link knows it.

    Attributes:
        slot: number of the slot, and the file for the receiver.
        segment: itself.
        count: messages in it that have not been given back.
    """

    slot: Slot
    segment: Segment
    count: int = 0


@dataclass(slots=True)
class LendingSlots:
    """The sender's slots of one link, and what it lends on it. Grows on demand; knows nothing of sockets.

    Attributes:
        most_bytes: limit of all slots together.
        refused: reason why the system has no more shared memory, once it has refused.
    """

    most_bytes: int
    refused: OSError | None = None
    _slots: dict[int, Slot] = field(default_factory=dict)
    _free: set[int] = field(default_factory=set)
    _loans: dict[int, Loan] = field(default_factory=dict)
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

    def lend_segment(self, segment: Segment) -> Slot | None:
        """Lend a segment once more; return the slot that it is to the receiver, or None where it cannot be one."""
        with self._lock:
            self._forget_dropped()
            loan = next((each for each in self._loans.values() if each.segment is segment), None)
            if loan is None:
                number = self._unused()
                if number is None:
                    return None
                try:
                    descriptor = os.dup(segment.descriptor)
                except OSError:  # this process may open no more files
                    return None
                loan = self._loans[number] = Loan(Slot(number, segment.memory, descriptor), segment)
            loan.count += 1
            return loan.slot

    def lends(self, segment: Segment) -> bool:
        """Return whether a segment has not been given back as often as it was lent."""
        with self._lock:
            return any(loan.count > 0 and loan.segment is segment for loan in self._loans.values())

    def end_loans(self) -> None:
        """Treat all segments as returned: the receiver is lost."""
        with self._lock:
            for loan in self._loans.values():
                loan.count = 0

    def reclaim(self, number: int) -> None:
        """Note that the receiver no longer needs a slot, or a message in a segment."""
        with self._lock:
            loan = self._loans.get(number)
            if loan is not None:
                loan.count = max(0, loan.count - 1)
            elif number in self._slots:
                self._free.add(number)

    @property
    def forgotten(self) -> int:
        """Slots that the receiver must still unmap, as a mask of their numbers."""
        return self._forgotten

    def mark_notified(self, mask: int) -> None:
        """Note that the receiver has been notified."""
        with self._lock:
            self._forgotten &= ~mask

    def close(self) -> None:
        """Release all memory that the receiver does not hold."""
        with self._lock:
            for slot in (*self._slots.values(), *(loan.slot for loan in self._loans.values())):
                slot.close_descriptor()
            self._slots.clear()
            self._free.clear()
            self._loans.clear()

    def _make(self, size: int) -> Slot | None:
        if size > self.most_bytes or self.refused is not None:
            return None
        # Free slots are all too small, else one had been lent: they make room.
        while self._free and (self._total() + size > self.most_bytes or self._unused() is None):
            gone = self._free.pop()
            del self._slots[gone]
            self._forgotten |= 1 << gone
        number = self._unused()
        if self._total() + size > self.most_bytes or number is None:
            return None
        try:
            descriptor = shared_file(size)
            memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            self.refused = error
            return None
        self._slots[number] = Slot(number, memory, descriptor)
        return self._slots[number]

    def _total(self) -> int:
        return sum(len(slot.memory) for slot in self._slots.values())

    def _unused(self) -> int | None:
        """Return the least number that is neither a slot's nor a segment's."""
        numbers = range(MOST_SLOTS)
        return next((each for each in numbers if each not in self._slots and each not in self._loans), None)

    def _forget_dropped(self) -> None:
        for number in [number for number, loan in self._loans.items() if loan.segment.dropped]:
            self._loans.pop(number).slot.close_descriptor()
            self._forgotten |= 1 << number


class BorrowedSlots:
    """The receiver's view of the slots of one link.

    Args:
        return_batches: callback with a slot's number when its tensor is no longer referenced, from any thread.
    """

    def __init__(self, return_batches: Callable[[int], None]) -> None:
        self._return_batches = return_batches
        self._memories: dict[int, mmap.mmap] = {}
        self._held: dict[int, weakref.ref[memoryview]] = {}
        """By the number of a slot; and by larger ones in turn, of segments that may be held several times."""
        self._turns = count(MOST_SLOTS)

    def add(self, place: int, descriptor: int) -> None:
        """Map the new slot or segment of a place; raise `MalformedMessage` for a file that could be truncated."""
        number = place & ~_IN_SEGMENT & ((1 << _START_BITS) - 1) if place >= 0 else place
        if not 0 <= number < MOST_SLOTS:
            raise MalformedMessage(f"a slot arrived as number {number}, where there are {MOST_SLOTS}")
        try:
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK == 0:
                raise MalformedMessage("a slot arrived that is not sealed")
            size = os.fstat(descriptor).st_size
            self._memories[number] = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except (OSError, ValueError) as error:
            raise MalformedMessage(f"a slot arrived that cannot be mapped: {error}") from None

    def forget(self, mask: int) -> None:
        """Release slots that will not be used again."""
        for number in [number for number in self._memories if mask >> number & 1]:
            del self._memories[number]

    def tensor(self, place: int, elements: int, dtype: torch.dtype) -> Tensor:
        """Return the payload at a place, shape `(elements,)`, which is given back when its last view is dropped.

        Raises:
            MalformedMessage: there is none, it is too small, or the last payload of that slot is still held.
        """
        start, slot = divmod(place, 1 << _START_BITS)
        in_segment, number = bool(slot & _IN_SEGMENT), slot & ~_IN_SEGMENT
        memory = self._memories.get(number) if place >= 0 else None
        size = elements * dtype.itemsize
        fits = memory is not None and 0 < size <= len(memory) - start
        if not fits or (start % dtype.itemsize if in_segment else start or number in self._held):
            raise MalformedMessage(
                f"a payload of {size} bytes was announced in slot {number}, which cannot be"
            )
        assert memory is not None, "it fits"
        view = memoryview(memory)[start : start + size]  # the storage of the tensor holds it
        held = next(self._turns) if in_segment else number
        self._held[held] = weakref.ref(view, lambda _: self._end(held, number))
        return torch.frombuffer(view, dtype=dtype, count=elements)

    def _end(self, held: int, number: int) -> None:
        del self._held[held]
        with suppress(OSError):  # the sender has left and needs it no more
            self._return_batches(number)


def _rounded(size: int) -> int:
    """Round a size up by at most an eighth, so that payloads of about the same size share slots."""
    unit = max(_SMALLEST_BYTES, 1 << max(0, size.bit_length() - 4))
    return -(-size // unit) * unit


class Sent(Handle):
    """The handle of a message that has left."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Return at once."""


@dataclass(slots=True)
class Parcel:
    """A message as it leaves.

    Attributes:
        header: header of the message.
        payload: `(n,)`, None if there is none or if it is in `slot`.
        slot: slot that holds the payload; None: no slot does.
        start: start of the payload in bytes, where the slot is a segment; else None.
    """

    header: bytes
    payload: Tensor | None
    slot: Slot | None
    start: int | None = None


class Pending(Handle):
    """The handle of a message that could not leave at once."""

    def __init__(self, parcel: Parcel, to: int) -> None:
        self.parcel = parcel
        self._to = to
        self._broken = False
        self._left = threading.Event()

    def end(self, broken: bool) -> None:
        """Note that it has left, or never will."""
        self.parcel.payload, self._broken = None, broken
        self._left.set()

    def done(self) -> bool:
        return self._left.is_set()

    def wait(self, patience_s: float | None = None) -> None:
        if not self._left.wait(patience_s) or self._broken:
            raise PeerLost(self._to, "sending to it")


MOST_SHARED_BYTES = 1 << 30
"""Limit of one link. A message that does not fit, because the receiver holds all of it, is sent in chunks."""

_OPENING_PATIENCE_S = 30
_log = logging.getLogger(__name__)


class OutgoingMemoryLink:
    """The sender's end. A message leaves at once if it can; else a thread sends it and all later ones.

    Args:
        card: card of the receiver.
        source: rank of this process.
        to: the receiver.
        membership: membership that is notified when the link ends.
        lent: memory from which it reads what lies there; None: all is copied.

    Raises:
        PeerLost: the receiver has failed or left.
        RunError: this process may open no more files.
    """

    def __init__(
        self, card: Card, source: Peer, to: Peer, membership: Membership, lent: LentSegments | None = None
    ) -> None:
        self._to = to.rank
        self._lent = lent
        self.generation = to.generation
        self._slots = LendingSlots(MOST_SHARED_BYTES)
        self._warned = False
        self._sending = threading.Lock()  # messages leave in the order in which they take it
        self._collecting = threading.Lock()
        self._waiting: deque[Pending] = deque()
        self._announced_exit = False
        self._socket = _connect(card, to.rank)
        try:
            self._socket.send(encode_hello(card.token, source))
        except OSError:
            raise PeerLost(to.rank, "opening a link to it") from None
        self._watcher = threading.Thread(
            target=self._watch, args=(membership,), name=f"watch {to.rank}", daemon=True
        )
        self._watcher.start()

    def start_send(self, message: Message, context: int) -> Handle:
        """Start to send a message; its tensor must be on the CPU and contiguous."""
        return self._start(message, context) or Sent()

    def lends(self, segment: Segment) -> bool:
        """Return whether the receiver still reads a segment."""
        self._collect()
        return self._slots.lends(segment)

    def close(self, patience_s: float) -> None:
        """Notify the receiver that nothing more follows, and wait for its goodbye."""
        with suppress(PeerLost):  # a process that is gone need not be informed
            pending = self._start(Message(Kind.CLOSE), 0)
            if pending is not None:
                pending.wait(patience_s)
        self._watcher.join(patience_s)
        self._slots.close()

    def _start(self, message: Message, context: int) -> Pending | None:
        """Return the messages that are still to be sent."""
        parcel = self._pack(message, context)
        with self._sending:
            if not self._waiting and self._sent_at_once(parcel):
                return None
            pending = Pending(parcel, self._to)
            self._waiting.append(pending)
            if len(self._waiting) == 1:
                name = f"sending to {self._to}"
                threading.Thread(target=self._send_waiting, name=name, daemon=True).start()
        return pending

    def _pack(self, message: Message, context: int) -> Parcel:
        header = encode_header(message, context)
        if message.tensor is None or message.tensor.numel() == 0:
            return Parcel(header, None, None)
        payload = message.tensor.detach()
        if payload.dim() != 1 or not payload.is_contiguous():
            payload = payload.reshape(-1).contiguous()
        if payload.nbytes <= MOST_INLINE_BYTES:
            return Parcel(header, payload, None)
        found = None if self._lent is None else self._lent.find(payload)
        if found is not None:
            segment, start = found
            segment.note(self)  # before it is lent: its owner may ask at any moment
            slot = self._slots.lend_segment(segment)
            if slot is not None:
                return Parcel(header, None, slot, start)
        slot = self._lend(payload)
        return Parcel(header, payload if slot is None else None, slot)

    def _lend(self, payload: Tensor) -> Slot | None:
        self._collect()
        slot = self._slots.lend(payload.nbytes)
        if slot is not None:
            slot.fill(payload)
        elif self._slots.refused is not None and not self._warned:
            self._warned = True
            _log.warning(
                "no shared memory for messages to rank %d (%s): they go through a socket, more slowly",
                self._to,
                self._slots.refused,
            )
        return slot

    def _sent_at_once(self, parcel: Parcel) -> bool:
        if parcel.payload is not None and parcel.payload.nbytes > MOST_INLINE_BYTES:
            return False
        # Without waiting: if the receiver is behind, a thread sends, and the caller continues.
        try:
            self._send_frame(parcel, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            raise PeerLost(self._to, "sending to it") from None
        return True

    def _send_waiting(self) -> None:
        """Send until nothing waits: one thread at a time, and no other process sends in the meantime."""
        while True:
            # It stays in the queue while it leaves, so that concurrent senders see that they must not
            # overtake.
            pending = self._waiting[0]
            try:
                self._send(pending.parcel)
            except OSError:
                break
            pending.end(broken=False)
            with self._sending:
                self._waiting.popleft()
                if not self._waiting:
                    return
        with self._sending:
            for pending in self._waiting:
                pending.end(broken=True)
            self._waiting.clear()

    def _send(self, parcel: Parcel) -> None:
        payload = parcel.payload
        if payload is None or payload.nbytes <= MOST_INLINE_BYTES:
            self._send_frame(parcel, 0)
            return
        parcel.slot = self._lend(payload)  # some may have been returned in the meantime
        self._send_frame(parcel, 0)
        if parcel.slot is None:
            raw = _raw(payload)
            for start in range(0, len(raw), CHUNK_BYTES):
                self._socket.send(raw[start : start + CHUNK_BYTES])

    def _send_frame(self, parcel: Parcel, flags: int) -> None:
        forgotten, slot = self._slots.forgotten, parcel.slot
        inside = slot is None and (parcel.payload is None or parcel.payload.nbytes <= MOST_INLINE_BYTES)
        place = IN_PACKET if inside else IN_CHUNKS
        if slot is not None:
            place = slot.number if parcel.start is None else place_in(slot.number, parcel.start)
        packet: list[bytes | memoryview] = [parcel.header, encode_place(place, forgotten)]
        if inside and parcel.payload is not None:
            packet.append(_raw(parcel.payload))
        files = []
        if slot is not None and slot.descriptor >= 0:
            files.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [slot.descriptor])))
        self._socket.sendmsg(packet, files, flags)
        # Only now: a send that would have had to wait has notified no receiver.
        self._slots.mark_notified(forgotten)
        if slot is not None:
            slot.close_descriptor()

    def _collect(self) -> None:
        """Collect what the receiver has given back, without waiting."""
        with self._collecting:
            while True:
                try:
                    numbers = self._socket.recv(1, socket.MSG_DONTWAIT)
                except OSError:  # nothing there
                    return
                if not numbers:
                    return
                if numbers[0] == GOODBYE:
                    self._announced_exit = True
                else:
                    self._slots.reclaim(numbers[0])

    def _watch(self, membership: Membership) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)  # returned slots wake no thread
        poll.poll()
        self._collect()
        if not self._announced_exit:
            self._slots.end_loans()
            membership.lose_receiver(Peer(self._to, self.generation))


def _connect(card: Card, to: int) -> PacketSocket:
    try:
        connection = PacketSocket()
    except OSError as error:
        raise RunError(
            f"no link to rank {to} can be opened ({error.strerror}): raise the limit, for instance with ulimit -n"
        ) from None
    # Not `settimeout`, with which a connection would fail at once if many others wait to be accepted.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _OPENING_PATIENCE_S, 0))
    try:
        connection.connect(f"\0{card.address}")
    except OSError:
        raise PeerLost(to, "opening a link to it") from None
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
    return connection


def _raw(payload: Tensor) -> memoryview:
    return payload.view(torch.uint8).numpy().data


_BACKLOG = 4096
_HELLO_PATIENCE_S = 30.0
_MOST_SILENT, _LEAST_SILENCE_S = 256, 1.0
"""Limit on connections without an introduction; above it, the oldest is closed after a second."""
_NOBODY = Peer(-1, 0)
_ONE_FILE_BYTES = socket.CMSG_SPACE(array("i").itemsize) if hasattr(socket, "CMSG_SPACE") else 0


class IncomingMemoryLinks:
    """Listens, with an acceptor thread and a reader thread a link; see `IncomingLinks`.

    Attributes:
        card: card for the senders.

    Raises:
        OSError: this system does not support it, with the reason.
    """

    def __init__(self, host: str, membership: Membership) -> None:
        _try_system()
        self.card = Card(host, f"polyrhythm/{secrets.token_hex(16)}", secrets.token_hex(TOKEN_BYTES))
        self._membership = membership
        self._readers: set[threading.Thread] = set()
        self._open: dict[threading.Thread, _Reading] = {}
        self._fewer = threading.Condition()  # silent ones
        self._silent: dict[PacketSocket, float] = {}  # since when, oldest first
        self._listener = PacketSocket()
        self._listener.bind(f"\0{self.card.address}")
        self._listener.listen(_BACKLOG)
        self._acceptor = threading.Thread(target=self._accept, name="acceptor of this host", daemon=True)
        self._acceptor.start()

    def close(self, patience_s: float) -> None:
        """Stop accepting, send a goodbye, and wait for the senders' last messages."""
        deadline = time.monotonic() + patience_s
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(patience_s)
        with self._fewer:
            for connection in self._silent:
                hang_up(connection)
        for reading in list(self._open.values()):
            reading.announce_exit()
        for reader in list(self._readers):
            reader.join(max(0.0, deadline - time.monotonic()))

    def wait_for_deliveries(self, source: Peer, patience_s: float) -> None:
        """Return when all that a sender sent before it left has been delivered, if that is soon."""
        deadline = time.monotonic() + patience_s
        for reader, reading in list(self._open.items()):
            if reading.source == source:
                reader.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        while (connection := accept_next(self._listener)) is not None:
            self._make_room()
            with self._fewer:
                self._silent[connection] = time.monotonic()
            reader = threading.Thread(target=self._read, args=(connection,), name="reader", daemon=True)
            self._readers.add(reader)
            reader.start()
            del connection  # it is the reader's

    def _make_room(self) -> None:
        with self._fewer:
            while len(self._silent) >= _MOST_SILENT:
                oldest, since_s = next(iter(self._silent.items()))
                # A rank introduces itself at once, and treats a closed connection as a loss.
                early_s = since_s + _LEAST_SILENCE_S - time.monotonic()
                if early_s <= 0:
                    hang_up(oldest)
                self._fewer.wait(early_s if early_s > 0 else _LEAST_SILENCE_S)

    def _read(self, connection: PacketSocket) -> None:
        # Here and not in the acceptor: a silent connection must not keep others out.
        source = self._greet(connection)
        if source is None:
            hang_up(connection)
            self._readers.discard(threading.current_thread())
            return
        reading = self._open[threading.current_thread()] = _Reading(connection, source, self._membership)
        self._membership.greet(source)
        try:
            while True:
                context, message = reading.next()
                if message.kind is Kind.CLOSE:
                    break
                self._membership.deliver(context, source, message)
                del message  # else it would be held until the next one arrives
            reading.announce_exit()
        except MalformedMessage as refusal:
            hang_up(connection)
            self._membership.refuse(source, refusal)
            self._membership.lose(source)
        except OSError:
            hang_up(connection)
            self._membership.lose(source)
        finally:
            self._open.pop(threading.current_thread(), None)
            self._readers.discard(threading.current_thread())

    def _greet(self, connection: PacketSocket) -> Peer | None:
        source = _NOBODY
        try:
            connection.settimeout(_HELLO_PATIENCE_S)
            token, source = decode_hello(connection.recv(HELLO_BYTES + 1))
            connection.settimeout(None)
            if not secrets.compare_digest(token, self.card.token):
                raise RefusedMessage(Reason.SENDER, "it does not know the token of this rank")
            self._membership.admit(source)
        except RefusedMessage as refusal:
            self._membership.refuse(source, refusal)
            return None
        except OSError:
            return None
        finally:
            with self._fewer:
                del self._silent[connection]
                self._fewer.notify_all()
        return source


class _Reading:
    """One link's socket and slots.

    Args:
        connection: connection to the sender; tensors that are dropped late still speak over it.
        membership: source of the largest allowed size of a payload.
    """

    def __init__(self, connection: PacketSocket, source: Peer, membership: Membership) -> None:
        self.source = source
        self._membership = membership
        self._socket = connection
        self._slots = BorrowedSlots(lambda number: _send_byte(connection, number))
        self._packet = bytearray(FRAME_BYTES + MOST_INLINE_BYTES)
        self._frame = memoryview(self._packet)
        self._farewell = threading.Lock()

    def next(self) -> tuple[int, Message]:
        """Return the next message and its context.

        Raises:
            OSError: the sender has gone.
            MalformedMessage: the received bytes are no message.
        """
        length, place = self._receive_frame()

        def find(elements: int, dtype: torch.dtype) -> Tensor:
            if elements == 0:
                return torch.empty(0, dtype=dtype)
            if place == IN_PACKET:
                return _unpacked(self._frame[FRAME_BYTES:length], elements, dtype)
            if place == IN_CHUNKS:
                return self._receive_chunks(torch.empty(elements, dtype=dtype))
            return self._slots.tensor(place, elements, dtype)

        return decode_header(bytes(self._frame[:HEADER_BYTES]), find, self._membership.most_bytes)

    def announce_exit(self) -> None:
        """Notify the sender that this rank is leaving, or has understood that the sender is."""
        with self._farewell, suppress(OSError):
            _send_byte(self._socket, GOODBYE)
            self._socket.shutdown(socket.SHUT_WR)

    def _receive_frame(self) -> tuple[int, int]:
        """Read a packet into the buffer and map the slot that it brings; return its length and the payload's place."""
        length, files = self._receive_packet()
        try:
            if length < FRAME_BYTES:
                raise MalformedMessage(f"a frame of {length} bytes arrived, not of {FRAME_BYTES} or more")
            place, forgotten = decode_place(self._frame)
            self._slots.forget(forgotten)
            for descriptor in files:
                self._slots.add(place, descriptor)
        finally:
            for descriptor in files:
                os.close(descriptor)
        return length, place

    def _receive_packet(self) -> tuple[int, array[int]]:
        try:
            received = self._socket.recvmsg_into([self._packet], _ONE_FILE_BYTES, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            # The sender has exited and needs no notice of its slots; its earlier messages are still readable.
            received = self._socket.recvmsg_into([self._packet], _ONE_FILE_BYTES, socket.MSG_CMSG_CLOEXEC)
        length, ancillary, flags, _ = received
        files = array("i")
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                files.frombytes(content)
        if length == 0:
            raise ConnectionError("the sender has gone")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            length = 0  # no frame of ours
        return length, files

    def _receive_chunks(self, tensor: Tensor) -> Tensor:
        rest = tensor.view(torch.uint8).numpy().data
        while rest:
            length = self._socket.recv_into(rest)
            if length == 0:
                raise ConnectionError("the sender has gone")
            rest = rest[length:]
        return tensor


def _unpacked(raw: memoryview, elements: int, dtype: torch.dtype) -> Tensor:
    if len(raw) != elements * dtype.itemsize:
        raise MalformedMessage(f"a payload of {elements * dtype.itemsize} bytes arrived with {len(raw)}")
    return torch.frombuffer(bytearray(raw), dtype=dtype)


def _send_byte(connection: PacketSocket, value: int) -> None:
    connection.send(bytes([value]), socket.MSG_DONTWAIT)


def _try_system() -> None:
    if not hasattr(socket, "AF_UNIX") or not hasattr(socket, "MSG_CMSG_CLOEXEC"):
        raise OSError("this system has no Unix-domain sockets that carry files")
    descriptor = shared_file(mmap.PAGESIZE)
    try:
        mmap.mmap(descriptor, mmap.PAGESIZE, flags=mmap.MAP_SHARED).close()
    finally:
        os.close(descriptor)

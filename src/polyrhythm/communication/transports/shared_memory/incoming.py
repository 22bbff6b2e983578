"""The receiver's end of all links from ranks of the same host."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import socket
import threading
import time
from array import array
from contextlib import suppress

import torch
from torch import Tensor

from polyrhythm.communication.message import (
    HEADER_BYTES,
    Kind,
    MalformedMessage,
    Message,
    Reason,
    RefusedMessage,
    decode_header,
)
from polyrhythm.communication.transports.membership import Membership, Peer
from polyrhythm.communication.transports.shared_memory.slots import (
    FRAME_BYTES,
    GOODBYE,
    HELLO_BYTES,
    IN_CHUNKS,
    IN_PACKET,
    MOST_INLINE_BYTES,
    TOKEN_BYTES,
    BorrowedSlots,
    Card,
    decode_hello,
    decode_place,
    shared_file,
)
from polyrhythm.communication.transports.sockets import PacketSocket, hang_up

_BACKLOG = 4096
_HELLO_PATIENCE_S = 30.0
_PAUSE_S = 0.1
_NOBODY = Peer(-1, 0)
_ONE_FILE_BYTES = socket.CMSG_SPACE(array("i").itemsize) if hasattr(socket, "CMSG_SPACE") else 0


class IncomingMemoryLinks:
    """Listens, with an acceptor thread and a reader thread a link; see `IncomingLinks`.

    Args:
        host: key of this host.
        membership: informed of what happens on the links.

    Attributes:
        card: for the senders.

    Raises:
        OSError: this system cannot do it; says why.
    """

    def __init__(self, host: str, membership: Membership) -> None:
        _try_system()
        self.card = Card(host, f"polyrhythm/{secrets.token_hex(16)}", secrets.token_hex(TOKEN_BYTES))
        self._membership = membership
        self._readers: set[threading.Thread] = set()
        self._open: dict[threading.Thread, _Reading] = {}
        self._silent: set[PacketSocket] = set()
        self._listener = PacketSocket()
        self._listener.bind(f"\0{self.card.address}")
        self._listener.listen(_BACKLOG)
        self._acceptor = threading.Thread(target=self._accept, name="acceptor of this host", daemon=True)
        self._acceptor.start()

    def close(self, patience_s: float) -> None:
        """Stop accepting, say goodbye, and wait for the senders' last words."""
        deadline = time.monotonic() + patience_s
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(patience_s)
        for connection in list(self._silent):
            hang_up(connection)
        for reading in list(self._open.values()):
            reading.say_goodbye()
        for reader in list(self._readers):
            reader.join(max(0.0, deadline - time.monotonic()))

    def wait_for_last_words(self, source: Peer, patience_s: float) -> None:
        """Return when all that a sender sent before it left has been delivered, if that is soon."""
        deadline = time.monotonic() + patience_s
        for reader, reading in list(self._open.items()):
            if reading.source == source:
                reader.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept_one()
            except OSError as error:
                if error.errno == errno.EINVAL:  # it has been shut down
                    return
                time.sleep(_PAUSE_S)  # too many open files: some may be closed soon
                continue
            reader = threading.Thread(target=self._read, args=(connection,), name="reader", daemon=True)
            self._readers.add(reader)
            reader.start()
            del connection  # it is the reader's

    def _read(self, connection: PacketSocket) -> None:
        # Here and not in the acceptor: who connects and says nothing must not keep others out.
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
                del message  # else it would be held until the next one comes
            reading.say_goodbye()
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
        self._silent.add(connection)
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
            self._silent.remove(connection)
        return source


class _Reading:
    """One link's socket and slots.

    Args:
        connection: to the sender; tensors that are dropped late still speak over it.
        source: the sender.
        membership: knows how large a payload may be.
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
            MalformedMessage: what came is no message.
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

    def say_goodbye(self) -> None:
        """Tell the sender that this rank is leaving, or has understood that the sender is."""
        with self._farewell, suppress(OSError):
            _send_byte(self._socket, GOODBYE)
            self._socket.shutdown(socket.SHUT_WR)

    def _receive_frame(self) -> tuple[int, int]:
        """Read a packet into the buffer and map the slot that it brings; return its length and the payload's place."""
        length, files = self._receive_packet()
        try:
            if length < FRAME_BYTES:
                raise MalformedMessage(f"a frame of {length} bytes came, not of {FRAME_BYTES} or more")
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
            # It is gone and will not hear of its slots; what it sent before is still there.
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
        raise MalformedMessage(f"a payload of {elements * dtype.itemsize} bytes came with {len(raw)}")
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

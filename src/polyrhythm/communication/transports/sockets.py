"""Sockets of links and collectives: each belongs to one process; children that are forked close theirs.

`PacketSocket` is a Unix-domain socket that keeps packets apart. `TcpSocket` does not wait for more to send,
and a silence of the network ends its connection.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self, TypeVar
from weakref import WeakSet


class OwnedSocket(socket.socket):
    """A socket that is closed when it is no longer referenced, and not before.

    Several threads use one at a time, and one that is closed under them could be another file already. Children that
    are forked close theirs, for they would keep a connection open after this process has died.

    Args:
        fileno: file descriptor of a socket that is there already.
    """

    def __init__(self, family: int, kind: int, fileno: int | None = None) -> None:
        super().__init__(family, kind, fileno=fileno)
        _open.add(self)

    def __del__(self) -> None:
        self.close()

    def accept_one(self) -> Self:
        """Wait for a connection; raise `OSError` if this socket has been shut down."""
        fileno = self.accept()[0].detach()
        made = type(self).__new__(type(self))
        OwnedSocket.__init__(made, self.family, self.type, fileno)
        return made


_Listener = TypeVar("_Listener", bound=OwnedSocket)
_FULL_PAUSE_S = 0.1


def accept_next(listener: _Listener) -> _Listener | None:
    """Wait for a connection; return None when the listener has been shut down."""
    while True:
        try:
            return listener.accept_one()
        except OSError as error:
            if error.errno == errno.EINVAL:
                return None
            time.sleep(_FULL_PAUSE_S)  # too many open files: some may be closed soon


def hang_up(connection: socket.socket) -> None:
    """End a connection in both directions, even if another thread waits on it."""
    with suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


_open: WeakSet[OwnedSocket] = WeakSet()


def _close_in_child() -> None:
    for connection in list(_open):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


class PacketSocket(OwnedSocket):
    """A socket with packets that arrive whole and in order."""

    def __init__(self) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_SEQPACKET)


SILENCE_S = 20
"""Seconds of unacknowledged data before a connection counts as broken."""

RECORD_BYTES = 28_000
"""Size of a record: the system cuts it into packets as late as it can. A token bucket on the way that holds
less than a record (32 kB are usual) cuts it before, packet by packet, at 20 times the work, and loses some
where that is too much. Larger records would save little at the speed of such links; inside a host, ten times
as fast, they do.
"""

_RECORD_IN_HOST_BYTES = 1 << 20
"""One call for all of 10 MB takes 1.2 times as long there and back, as the receiver is woken late."""

END_OF_RECORD = int(getattr(socket, "MSG_EOR", 0))  # combining flags of an enum takes longer than the call
"""Flag of a call with the last byte of a packet: without it the system would merge two records into one packet."""

_BACKLOG = 4096
_DIALLING_S = 5.0
_KEEPALIVE_S = 5
_WHOLE = getattr(socket, "MSG_WAITALL", 0)
_PIECE_BYTES = 1 << 18
"""Limit of one call. The system opens its window when a call ends: one of 10 MB takes 1.5 times as long as many."""


class TcpSocket(OwnedSocket):
    """One end of a connection.

    Attributes:
        record_bytes: bytes of what leaves as one.
    """

    def __init__(self, family: int) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self.record_bytes = RECORD_BYTES


def listen(address: str) -> TcpSocket:
    """Listen on a free port of one interface.

    Args:
        address: address of the interface, IPv4 or IPv6.

    Raises:
        OSError: this host has no such address, or no port is free.
    """
    family, _, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    listener = TcpSocket(family)
    listener.bind(where)
    listener.listen(_BACKLOG)
    return listener


def dial(address: str, port: int, hold: Callable[[TcpSocket], None]) -> TcpSocket:
    """Connect to a listener.

    Args:
        address: address of its host.
        port: TCP port of it.
        hold: receiver of the socket before any wait; closing it ends the wait.

    Raises:
        OSError: it cannot be reached, or it refuses; or no more files may be open.
    """
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    connection = TcpSocket(family)
    hold(connection)
    connection.settimeout(_DIALLING_S)
    connection.connect(where)
    if connection.getsockname()[0] == connection.getpeername()[0]:  # inside a host: no bucket on the way
        connection.record_bytes = _RECORD_IN_HOST_BYTES
    tune(connection)
    return connection


def tune(connection: socket.socket) -> None:
    """Set the options of a connection; options that this system lacks are skipped."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_S),
        ("TCP_KEEPINTVL", _KEEPALIVE_S),
        ("TCP_KEEPCNT", SILENCE_S // _KEEPALIVE_S - 1),
        ("TCP_USER_TIMEOUT", 1000 * SILENCE_S),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def receive_exactly(connection: socket.socket, length: int, deadline_s: float) -> bytes:
    """Receive `length` bytes before a deadline; fewer only if the other end has nothing more to send.

    Args:
        connection: connection to receive from; its timeout is changed.
        length: number of bytes.
        deadline_s: deadline in seconds on the clock of `time.monotonic`.

    Raises:
        OSError: the connection broke, or the time is over.
    """
    received = bytearray()
    while len(received) < length:
        connection.settimeout(max(1e-3, deadline_s - time.monotonic()))
        more = connection.recv(length - len(received))
        if not more:
            break
        received += more
        if time.monotonic() > deadline_s:
            raise TimeoutError("the other end takes too long")
    return bytes(received)


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill a piece of memory, in few calls of the system.

    Raises:
        OSError: the connection broke, or the other end has nothing more to send.
    """
    while target:
        length = connection.recv_into(target[:_PIECE_BYTES], 0, _WHOLE)
        if length == 0:
            raise ConnectionError("the other end has gone")
        target = target[length:]

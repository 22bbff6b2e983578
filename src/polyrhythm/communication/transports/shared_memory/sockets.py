"""Unix-domain sockets that keep packets apart and belong to one process."""

from __future__ import annotations

import os
import socket
from weakref import WeakSet

_open: WeakSet[socket.socket] = WeakSet()


def packet_socket() -> socket.socket:
    """Makes a socket of this process alone.

    Raises:
        OSError: this system has none.
    """
    if not hasattr(socket, "AF_UNIX") or not hasattr(socket, "MSG_CMSG_CLOEXEC"):
        raise OSError("this system has no Unix-domain sockets that carry files")
    return owned(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))


def owned(connection: socket.socket) -> socket.socket:
    """Sees to it that children of this process do not keep a connection open after its death."""
    _open.add(connection)
    return connection


def _close_in_child() -> None:
    for connection in list(_open):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)

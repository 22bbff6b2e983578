"""Sockets that belong to one process."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Self
from weakref import WeakSet


class OwnedSocket(socket.socket):
    """A socket that is closed when nobody holds it any more, and not before.

    Several threads use one at a time, and one that is closed under them could be another file already. Children that
    are forked close theirs, for they would keep a connection open after this process has died.

    Args:
        family: of addresses.
        kind: of socket.
        fileno: of a socket that is there already.
    """

    def __init__(self, family: int, kind: int, fileno: int | None = None) -> None:
        super().__init__(family, kind, fileno=fileno)
        _open.add(self)

    def __del__(self) -> None:
        self.close()

    def accept_one(self) -> Self:
        """Waits for a connection.

        Raises:
            OSError: this socket has been shut down.
        """
        fileno = self.accept()[0].detach()
        made = type(self).__new__(type(self))
        OwnedSocket.__init__(made, self.family, self.type, fileno)
        return made


def hang_up(connection: socket.socket) -> None:
    """Ends a connection in both directions, whoever is waiting on it."""
    with suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


_open: WeakSet[OwnedSocket] = WeakSet()


def _close_in_child() -> None:
    for connection in list(_open):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)

"""Unix-domain sockets that keep packets apart and belong to one process."""

from __future__ import annotations

import socket

from polyrhythm.communication.transports.owned_socket import OwnedSocket


class PacketSocket(OwnedSocket):
    """A socket whose packets arrive whole and in order."""

    def __init__(self) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_SEQPACKET)

"""HOST:PORT, as people write it."""

from __future__ import annotations

import socket
from typing import NamedTuple

from polyrhythm.errors import RequestError

LOOPBACK = "127.0.0.1"
_MOST_PORT = 65535


class Address(NamedTuple):
    """Where a door is.

    Attributes:
        host: its name or number.
        port: 0 for any that is free.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Reads `HOST:PORT`, or a port alone, which is one of the loopback interface.

    Raises:
        RequestError: it is something else.
    """
    host, _, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or LOOPBACK
    if not (port.isascii() and port.isdecimal() and int(port) <= _MOST_PORT):
        raise RequestError(
            f"cannot read the address {text!r}: write HOST:PORT, such as 10.0.0.5:4711, or PORT"
        )
    return Address(host, int(port))


def listener_at(address: Address) -> socket.socket:
    """Listens at an address of this host that others reach.

    Raises:
        RequestError: it is none, or in use.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        if target[0] in ("0.0.0.0", "::"):
            raise RequestError(
                f"--listen {address} names no interface: give the address under which others reach this host"
            )
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise RequestError(
            f"--listen {address}: {error.strerror or error}; give an address of this host"
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen()
    except OSError as error:
        listener.close()
        raise RequestError(
            f"--listen {address} cannot be used ({error.strerror}): give another port, or an address of this host"
        ) from None
    return listener

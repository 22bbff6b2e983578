"""Members of a communicator that are threads of this process, and talk over loopback."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from polyrhythm.communication.transports.between_hosts.collectives import HostCollectives
from polyrhythm.communication.transports.sockets import TcpSocket, listen

PATIENCE_S = 30.0


def pair() -> tuple[TcpSocket, TcpSocket]:
    """Connects two ends."""
    with listen("127.0.0.1") as listener:
        near = TcpSocket(socket.AF_INET)
        near.connect(listener.getsockname())
        return near, listener.accept_one()


@contextmanager
def mesh(size: int) -> Iterator[list[HostCollectives]]:
    """Makes the collectives of members 0, 1, …, who are ranks 10, 11, …"""
    connections: list[dict[int, TcpSocket]] = [{} for _ in range(size)]
    for one in range(size):
        for other in range(one):
            connections[one][other], connections[other][one] = pair()
    ranks = tuple(range(10, 10 + size))
    members = [HostCollectives(member, ranks, connections[member]) for member in range(size)]
    try:
        yield members
    finally:
        for member in members:
            member.close()


def together(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Does works at once, each on a thread; gives what each returned or raised."""
    found: list[Any] = [None] * len(works)

    def run(place: int) -> None:
        try:
            found[place] = works[place]()
        except BaseException as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a member still waits"
    return found

"""A connection to another member, which never makes anybody wait."""

from __future__ import annotations

import heapq
import socket
from collections.abc import Callable
from typing import Protocol

from polyrhythm.communication.transports.between_hosts.addition import Outgoing
from polyrhythm.communication.transports.between_hosts.frames import HEADER_BYTES, Frame
from polyrhythm.communication.transports.owned_socket import hang_up
from polyrhythm.communication.transports.tcp.sockets import TcpSocket

_MOST_ASLEEP_BYTES = 64 << 10
_MOST_READS = 16
"""At a time: then others have their turn."""


class Sink(Protocol):
    """What frames are for."""

    def target(self, source: int, frame: Frame) -> memoryview:
        """Gives where a frame's bytes belong."""

    def arrived(self, source: int, frame: Frame) -> None:
        """Is told when they are there."""


class Stream:
    """One member's end of the connection to another.

    Frames of earlier collectives leave first, whenever they are added.

    Args:
        connection: to the other member.
        member: its number.
        sink: what frames are for.
        sent: is told of every frame that has left.
    """

    def __init__(
        self, connection: TcpSocket, member: int, sink: Sink, sent: Callable[[Outgoing], None]
    ) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.member = member
        self._sink = sink
        self._sent = sent
        self._queue: list[tuple[int, int, Outgoing]] = []
        self._queued = 0
        self._leaving: Outgoing | None = None
        self._left_over: list[memoryview] = []
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._header_came = 0
        self._frame: Frame | None = None
        self._payload = memoryview(b"")
        self._wakes_at = 1

    @property
    def backlog(self) -> bool:
        """Whether there is something to send."""
        return self._leaving is not None or bool(self._queue)

    def add(self, frame: Outgoing) -> None:
        """Puts a frame in its place among those to send."""
        self._queued += 1
        heapq.heappush(self._queue, (frame.addition.number, self._queued, frame))

    def send_on(self) -> None:
        """Sends as much as the system takes.

        Raises:
            OSError: the connection broke.
        """
        while self.backlog:
            if self._leaving is None:
                self._leaving = heapq.heappop(self._queue)[2]
                self._left_over = [memoryview(self._leaving.header), self._leaving.payload]
            try:
                sent = self.connection.sendmsg(self._left_over)
            except BlockingIOError:
                return
            self._left_over = _without(self._left_over, sent)
            if not self._left_over:
                frame, self._leaving = self._leaving, None
                self._sent(frame)

    def receive_on(self) -> None:
        """Takes what has come.

        Raises:
            OSError: the connection broke.
            EOFError: the other member has closed it.
        """
        for _ in range(_MOST_READS):
            room = [self._payload, self._header[self._header_came :]]
            try:
                came = self.connection.recvmsg_into(room if self._payload else room[1:])[0]
            except BlockingIOError:
                break
            if not came:
                raise EOFError
            self._take(came)
            if came < len(room[0]) + len(room[1]):
                break
        self._sleep_until(min(_MOST_ASLEEP_BYTES, max(1, len(self._payload))))

    def close(self) -> None:
        """Ends the connection."""
        hang_up(self.connection)
        self.connection.close()
        self._queue, self._leaving, self._left_over = [], None, []
        self._payload = memoryview(b"")

    def _sleep_until(self, nbytes: int) -> None:
        """Asks the system to wake nobody until so many bytes are there, or no more fit."""
        if nbytes != self._wakes_at:
            self._wakes_at = nbytes
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def _take(self, came: int) -> None:
        of_payload = min(came, len(self._payload))
        self._payload = self._payload[of_payload:]
        if self._frame is not None and not self._payload:
            frame, self._frame = self._frame, None
            self._sink.arrived(self.member, frame)
        self._header_came += came - of_payload
        if self._header_came == HEADER_BYTES:
            self._header_came = 0
            self._frame = Frame.decode(self._header)
            self._payload = self._sink.target(self.member, self._frame)


def _without(parts: list[memoryview], count: int) -> list[memoryview]:
    """Gives what is left of some bytes without the first of them."""
    left = []
    for part in parts:
        taken = min(count, len(part))
        count -= taken
        if taken < len(part):
            left.append(part[taken:])
    return left

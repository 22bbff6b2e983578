"""A connection to another member, which never makes anybody wait."""

from __future__ import annotations

import heapq
import socket
import time
from collections.abc import Callable
from typing import Protocol

from polyrhythm.communication.transports.between_hosts.addition import Outgoing
from polyrhythm.communication.transports.between_hosts.frames import HEADER_BYTES, Frame
from polyrhythm.communication.transports.owned_socket import hang_up
from polyrhythm.communication.transports.tcp.silence import Silence
from polyrhythm.communication.transports.tcp.sockets import END_OF_RECORD, RECORD_BYTES, TcpSocket

PATIENCE_S = 60.0
"""Without an answer of another host; as long as links have without any way to it."""

_MOST_ASLEEP_BYTES = 128 << 10
_MOST_READS, _MOST_WRITES = 16, 64
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
        patience_s: for how long nothing that is sent may be answered.
    """

    def __init__(
        self,
        connection: TcpSocket,
        member: int,
        sink: Sink,
        sent: Callable[[Outgoing], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._silence = Silence(connection, patience_s)
        self.member = member
        self._sink = sink
        self._sent = sent
        self._queue: list[tuple[int, int, Outgoing]] = []
        self._queued = 0
        self._leaving: Outgoing | None = None
        self._sent_bytes = 0  # of the payload that leaves; negative: of its header
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
        for _ in range(_MOST_WRITES):
            if self._leaving is None:
                if not self._queue:
                    return
                self._leaving, self._sent_bytes = heapq.heappop(self._queue)[2], -HEADER_BYTES
            try:
                self._sent_bytes += self._send_record(self._leaving)
            except BlockingIOError:
                return
            if self._sent_bytes == len(self._leaving.payload):
                frame, self._leaving = self._leaving, None
                self._sent(frame)

    def _send_record(self, frame: Outgoing) -> int:
        begin = self._sent_bytes
        if begin >= 0:
            return self.connection.send(frame.payload[begin : begin + RECORD_BYTES], END_OF_RECORD)
        header = frame.header[begin:]
        return self.connection.sendmsg(
            [header, frame.payload[: RECORD_BYTES - HEADER_BYTES]], [], END_OF_RECORD
        )

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

    def is_cut_off(self) -> bool:
        """Whether the other member's host has answered nothing for too long."""
        return self._silence.lasts_too_long(time.monotonic())

    def close(self) -> None:
        """Ends the connection."""
        hang_up(self.connection)
        self.connection.close()
        self._queue, self._leaving = [], None
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

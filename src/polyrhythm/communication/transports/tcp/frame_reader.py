"""Headers and payloads out of a stream of bytes, with as few calls of the system as may be."""

from __future__ import annotations

import socket

from polyrhythm.communication.transports.tcp.sockets import receive_into

_BUFFER_BYTES = 1 << 16


class FrameReader:
    """Reads from one connection; short pieces come many at a time, long ones straight to where they belong.

    Args:
        connection: blocks without a limit of time.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0

    def take(self, length: int) -> bytes:
        """Gives the next bytes.

        Args:
            length: how many; fewer than the buffer has.

        Raises:
            OSError: the connection broke, or the other end has gone.
        """
        if self._start + length > len(self._buffer):
            rest = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, len(rest)
            self._buffer[: len(rest)] = rest
        while self._end - self._start < length:
            received = self._connection.recv_into(self._buffer[self._end :])
            if received == 0:
                raise ConnectionError("the other end has gone")
            self._end += received
        taken = bytes(self._buffer[self._start : self._start + length])
        self._advance(length)
        return taken

    def fill(self, target: memoryview) -> None:
        """Fills a piece of memory with the next bytes; raises what `take` raises."""
        ready = min(len(target), self._end - self._start)
        target[:ready] = self._buffer[self._start : self._start + ready]
        self._advance(ready)
        receive_into(self._connection, target[ready:])

    def _advance(self, length: int) -> None:
        self._start += length
        if self._start == self._end:
            self._start = self._end = 0

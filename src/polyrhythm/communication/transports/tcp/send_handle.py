"""Messages on their way over a link, and the handles of their senders."""

from __future__ import annotations

import threading

import torch

from polyrhythm.communication.message import Message, encode_header
from polyrhythm.communication.transports.tcp.sockets import END_OF_RECORD, TcpSocket
from polyrhythm.errors import PeerLost

MOST_COPIED_BYTES = 1 << 16
"""Of a payload that a link copies, so that nobody waits until it has arrived."""


class SendHandle:
    """A message that is leaving.

    A short one is copied, and has left when the system has taken it. The memory of a longer one is read until the
    receiver has all of it: a connection may break, and then it is sent again.

    Args:
        message: to be sent; its tensor is on the CPU.
        context: of the communicator.
        to: rank of the receiver.

    Attributes:
        is_short: whether it has been copied.
        nbytes: of header and payload.
    """

    __slots__ = ("_broken", "_left", "_pieces", "_to", "is_short", "nbytes")

    def __init__(self, message: Message, context: int, to: int) -> None:
        header, payload = encode_header(message, context), _payload(message)
        self._to = to
        self._left = threading.Event()
        self._broken = False
        self.nbytes = len(header) + len(payload)
        self.is_short = len(payload) <= MOST_COPIED_BYTES
        self._pieces: list[bytes | memoryview] = [header, payload]
        if self.is_short and payload:
            self._pieces = [b"".join((header, payload))]

    def write(self, connection: TcpSocket, start: int, flags: int = 0) -> int:
        """Hands one record to the system; gives how many bytes it has taken.

        Args:
            connection: to the receiver.
            start: how many have been taken before.
            flags: of the call.

        Raises:
            OSError: the connection broke, or nothing can be taken at once where `flags` say so.
        """
        record, room = [], connection.record_bytes
        for piece in self._pieces:
            if start < len(piece):
                record.append(memoryview(piece)[start : start + room])
                room -= len(record[-1])
            start = max(0, start - len(piece))
        if not record:
            raise ConnectionAbortedError("the message has been given up")
        return connection.sendmsg(record, (), flags | END_OF_RECORD)

    def written(self) -> None:
        """Notes that the system has taken all of it."""
        if self.is_short:
            self._left.set()

    def end(self, broken: bool) -> None:
        """Notes that the receiver has it, or never will."""
        if not self._left.is_set():
            self._broken = broken
        self._pieces = []
        self._left.set()

    def done(self) -> bool:
        """Whether it has left, or never will."""
        return self._left.is_set()

    def wait(self, patience_s: float | None = None) -> None:
        """Blocks until the message has left.

        Raises:
            PeerLost: the receiver is gone, or takes longer than `patience_s`.
        """
        if not self._left.wait(patience_s) or self._broken:
            raise PeerLost(self._to, "sending to it")


def _payload(message: Message) -> memoryview:
    if message.tensor is None or message.tensor.numel() == 0:
        return memoryview(b"")
    vector = message.tensor.detach()
    if vector.dim() != 1 or not vector.is_contiguous():
        vector = vector.reshape(-1).contiguous()
    raw: memoryview = vector.view(torch.uint8).numpy().data
    return raw

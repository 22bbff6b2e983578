"""The sender's end of a link between two ranks over TCP.

    sender                                                                   receiver
    start_send ── up to 1 MiB: at once ───┐
        └─ else: outbox ─▶ writer thread ─┴── header, payload, header, … ──▶ reader thread ─▶ inbox
    handles ◀── keeper thread ◀────────────── messages received so far, goodbye ─┘

A link is one-directional and opened by the sender when it first has something to send. It outlives its
connections: if one breaks, the keeper opens another, the receiver reports how many messages it has, and the
rest is sent again. So nothing is lost, doubled or out of order. The link is over when the receiver has sent its
goodbye; when its process is gone (its listener is closed), it does without this rank, or it cannot be reached
for as long as the membership has patience; or when the rank gives it up because it knows better.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress

import torch

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.message import Kind, Message, encode_header
from polyrhythm.communication.transports.membership import Membership, Peer
from polyrhythm.communication.transports.sockets import END_OF_RECORD, TcpSocket, hang_up, receive_into
from polyrhythm.communication.transports.tcp.handshake import (
    LONGEST_PAUSE_S,
    NAME_BYTES,
    Answer,
    Attempts,
    Identity,
    ProcessExited,
    TcpCard,
    answer,
)
from polyrhythm.errors import PeerLost

MOST_COPIED_BYTES = 1 << 16
"""Largest payload that a link copies, so that the sender does not wait until it has arrived."""


class SendHandle(Handle):
    """A message that is leaving.

    A short one is copied, and has left when the system has taken it. The memory of a longer one is read until the
    receiver has all of it: a connection may break, and then it is sent again.

    Args:
        message: message to be sent; its tensor is on the CPU.
        to: rank of the receiver.

    Attributes:
        is_short: whether it has been copied.
        nbytes: number of bytes of header and payload.
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
        # A short message is copied, so that its tensor may change as soon as it is written. A long one lends its memory
        # until the receiver has it: after a break it is written again.
        if self.is_short and payload:
            self._pieces = [b"".join((header, payload))]

    def write(self, connection: TcpSocket, start: int, flags: int = 0) -> int:
        """Hand one record to the system; return how many bytes it has taken.

        Args:
            connection: connection to the receiver.
            start: number of bytes written before.
            flags: flags of the call.

        Raises:
            OSError: the connection broke, or `flags` forbid blocking and nothing can be written at once.
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
        """Note that the system has taken all of it."""
        if self.is_short:
            self._left.set()

    def end(self, broken: bool) -> None:
        """Note that the receiver has it, or never will."""
        if not self._left.is_set():
            self._broken = broken
        self._pieces = []
        self._left.set()

    def done(self) -> bool:
        return self._left.is_set()

    def wait(self, patience_s: float | None = None) -> None:
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


class Outbox:
    """Messages in the order of sending. Knows nothing of threads: its owner locks.

        0 1 2 3 │ 4 5 6 │ 7 8 9
        arrived │ written │ to be written        after a break, writing continues behind the arrived messages

    Attributes:
        arrived: messages that the receiver has.
        started: bytes of the next message that have been written already.
    """

    def __init__(self) -> None:
        self.arrived = self.started = 0
        self._kept: deque[SendHandle] = deque()
        self._written = 0

    @property
    def waits(self) -> bool:
        """Whether there is something to be written."""
        return self._written < self.arrived + len(self._kept)

    def put(self, message: SendHandle) -> None:
        """Add a message."""
        self._kept.append(message)

    def next(self) -> tuple[int, SendHandle]:
        """Return the next message to write, and its number."""
        return self._written, self._kept[self._written - self.arrived]

    def wrote(self, number: int) -> None:
        """Note that all of a message has been written; its receiver may have acknowledged it before."""
        if number == self._written:
            self._kept[number - self.arrived].written()
            self._written, self.started = number + 1, 0

    def arrive(self, count: int) -> bool:
        """Note that the receiver has the first `count` messages; return whether that can be."""
        if not self.arrived <= count <= self.arrived + len(self._kept):
            return False
        while self.arrived < count:
            self._kept.popleft().end(broken=False)
            self.arrived += 1
        if self._written < count:
            self._written, self.started = count, 0
        return True

    def rewind(self) -> None:
        """Has all that has not arrived written again: the connection is new."""
        self._written, self.started = self.arrived, 0

    def end(self) -> None:
        """Release all that has not arrived."""
        while self._kept:
            self._kept.popleft().end(broken=True)


WORD = struct.Struct("<Q")
"""Word to the sender: number of the link's received messages, or `GOODBYE`."""

GOODBYE = (1 << 64) - 1
_MOST_AT_ONCE_BYTES = 1 << 20
"""Bytes of a message that the caller's thread passes to the system, as far as that takes it."""

_ENDING_S = 1.0


class OutgoingTcpLink:
    """The sender's end; the connection is opened in the background."""

    def __init__(self, identity: Identity, card: TcpCard, to: Peer, membership: Membership) -> None:
        self._identity = identity
        self._card = card
        self._to = to
        self._membership = membership
        self.generation = to.generation
        self._number = secrets.token_bytes(NAME_BYTES)
        self._attempts = Attempts(card.address, card.port, lambda: membership.patience_s)
        self._news = threading.Condition()
        self._outbox = Outbox()
        self._connection: TcpSocket | None = None
        self._writing = self._over = self._closing = self._left = False
        self._writer: threading.Thread | None = None
        self._keeper = threading.Thread(target=self._keep, name=f"link to {to.rank}", daemon=True)
        self._keeper.start()

    def start_send(self, message: Message, context: int) -> SendHandle:
        """Start to send a message; its tensor must be on the CPU.

        Raises:
            PeerLost: the link is over.
        """
        handle = SendHandle(message, context, self._to.rank)
        with self._news:
            if self._over:
                raise PeerLost(self._to.rank, "sending to it")
            # The caller's thread writes a short message itself, where that keeps the order: waking the writer takes
            # longer.
            turn = not self._writing and not self._outbox.waits
            self._outbox.put(handle)
            if not (turn and handle.nbytes <= _MOST_AT_ONCE_BYTES and self._written_at_once()):
                self._wake_writer()
        return handle

    def close(self, patience_s: float) -> None:
        """Notify the receiver that nothing more follows, and wait for its goodbye."""
        with suppress(PeerLost):  # a process that is gone need not be informed
            self._closing = True
            self.start_send(Message(Kind.CLOSE), 0)
        self._keeper.join(patience_s)
        self.give_up()
        self._keeper.join(_ENDING_S)
        if self._writer is not None:
            self._writer.join(_ENDING_S)

    def give_up(self) -> None:
        """End the link at once, even if another thread waits for it; called on any thread."""
        with self._news:
            self._over = True
            if self._connection is not None:
                self._break(self._connection)
            self._outbox.end()
            self._news.notify_all()
        self._attempts.end()

    def _written_at_once(self) -> bool:
        connection, (number, handle) = self._connection, self._outbox.next()
        if connection is None:
            return False
        try:
            while self._outbox.started < handle.nbytes:
                self._outbox.started += handle.write(connection, self._outbox.started, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            self._break(connection)
            return False
        self._outbox.wrote(number)
        return not self._outbox.waits

    def _wake_writer(self) -> None:
        if self._writer is None:
            name = f"sending to {self._to.rank}"
            self._writer = threading.Thread(target=self._write, name=name, daemon=True)
            self._writer.start()
        self._news.notify_all()

    def _break(self, connection: TcpSocket) -> None:
        """End a connection; the keeper sees it."""
        if self._connection is connection:
            self._connection = None
        hang_up(connection)

    def _write(self) -> None:
        """Send the queued messages."""
        while True:
            with self._news:
                self._writing = False
                self._news.wait_for(
                    lambda: self._over or (self._connection is not None and self._outbox.waits)
                )
                connection, started = self._connection, self._outbox.started
                if self._over or connection is None:
                    return
                number, handle = self._outbox.next()
                self._writing = True
            try:
                while started < handle.nbytes:
                    started += handle.write(connection, started)
            except OSError:
                with self._news:
                    self._break(connection)
                continue
            with self._news:
                # Else the keeper has a new connection, on which all that has not arrived is written again.
                if self._connection is connection:
                    self._outbox.wrote(number)

    def _keep(self) -> None:
        """Keep a connection open until the link is over."""
        with suppress(ProcessExited):
            while not (self._left and self._closing):  # a leaving rank may still receive the last messages
                if self._wait_for_end(self._attempts.pause_s()):
                    break
                connection = self._attempts.make(self._agree)
                if connection is None:
                    continue
                began_s, arrived = time.monotonic(), self._outbox.arrived
                with suppress(OSError):
                    self._listen(connection)
                with self._news:
                    self._break(connection)
                # One that carried something, or lasted, starts patience afresh; else a way that breaks at once would be
                # tried for ever.
                if self._outbox.arrived > arrived or time.monotonic() - began_s > LONGEST_PAUSE_S:
                    self._attempts.begin_again()
        given_up = self._over
        self.give_up()
        if not given_up and not self._left:
            self._membership.lose_receiver(self._to)

    def _wait_for_end(self, pause_s: float) -> bool:
        with self._news:
            return self._news.wait_for(lambda: self._over, pause_s)

    def _agree(self, connection: TcpSocket) -> TcpSocket:
        """Begin to use a connection, where the last one ended."""
        text, received = answer(connection, self._identity, self._card, self._number)
        self._left = self._left or text is Answer.ENDED_WELL
        with self._news:
            if text is not Answer.GO_ON or self._over or not self._outbox.arrive(received):
                raise ProcessExited
            self._outbox.rewind()
            self._connection = connection
            # Also what the callers' threads had written, when there has been no writer so far.
            if self._outbox.waits:
                self._wake_writer()
        return connection

    def _listen(self, connection: TcpSocket) -> None:
        """Handle the receiver's words, until the connection ends; raise `OSError` if it has ended."""
        word = memoryview(bytearray(WORD.size))
        while True:
            receive_into(connection, word)
            (count,) = WORD.unpack(word)
            if count == GOODBYE:
                self._left = True
                continue
            with self._news:
                if not self._outbox.arrive(count):
                    raise ConnectionError("the receiver has more than was sent")

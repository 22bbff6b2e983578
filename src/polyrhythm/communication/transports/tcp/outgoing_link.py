"""The sender's end of a link between two ranks over TCP.

    sender                                                                   receiver
    start_send ── up to 1 MiB: at once ───┐
        └─ else: outbox ─▶ writer thread ─┴── header, payload, header, … ──▶ reader thread ─▶ inbox
    handles ◀── keeper thread ◀────────────── messages received so far, goodbye ─┘

A link is one-directional and opened by the sender when it first has something to say. It outlives its connections:
if one breaks, the keeper opens another, the receiver says how many messages it has, and the rest is sent again. So
nothing is lost, doubled or out of order. The link is over when the receiver has said goodbye; when its process is gone
(nobody listens there any more), it does without this rank, or it cannot be reached for as long as the membership has
patience; or when somebody who knows better gives it up.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from contextlib import suppress

from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.membership import Membership, Peer
from polyrhythm.communication.transports.owned_socket import hang_up
from polyrhythm.communication.transports.tcp.attempts import LONGEST_PAUSE_S, Attempts, ProcessGone
from polyrhythm.communication.transports.tcp.card import NAME_BYTES, Identity, TcpCard
from polyrhythm.communication.transports.tcp.challenge import Answer, answer
from polyrhythm.communication.transports.tcp.outbox import Outbox
from polyrhythm.communication.transports.tcp.send_handle import SendHandle
from polyrhythm.communication.transports.tcp.sockets import TcpSocket, receive_into
from polyrhythm.errors import PeerLost

WORD = struct.Struct("<Q")
"""What travels back: how many messages of the link have been received, or `GOODBYE`."""

GOODBYE = (1 << 64) - 1
_MOST_AT_ONCE_BYTES = 1 << 20
"""Of a message that the caller's thread hands to the system, as far as that takes it."""

_ENDING_S = 1.0


class OutgoingTcpLink:
    """The sender's end; the connection is opened in the background.

    Args:
        identity: of this process.
        card: of the receiver.
        to: the receiver.
        membership: is told if the link breaks.

    Attributes:
        incarnation: of the receiver.
    """

    def __init__(self, identity: Identity, card: TcpCard, to: Peer, membership: Membership) -> None:
        self._identity = identity
        self._card = card
        self._to = to
        self._membership = membership
        self.incarnation = to.incarnation
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
        """Starts to send a message; its tensor must be on the CPU.

        Raises:
            PeerLost: the link is over.
        """
        handle = SendHandle(message, context, self._to.rank)
        with self._news:
            if self._over:
                raise PeerLost(self._to.rank, "sending to it")
            turn = not self._writing and not self._outbox.waits
            self._outbox.put(handle)
            if not (turn and handle.nbytes <= _MOST_AT_ONCE_BYTES and self._written_at_once()):
                self._have_written()
        return handle

    def close(self, patience_s: float) -> None:
        """Tells the receiver that nothing more will come, and waits for its goodbye."""
        with suppress(PeerLost):  # who is gone needs not be told
            self._closing = True
            self.start_send(Message(Kind.CLOSE), 0)
        self._keeper.join(patience_s)
        self.give_up()
        self._keeper.join(_ENDING_S)
        if self._writer is not None:
            self._writer.join(_ENDING_S)

    def give_up(self) -> None:
        """Ends the link at once, whoever is waiting for it; called on any thread."""
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

    def _have_written(self) -> None:
        if self._writer is None:
            name = f"sending to {self._to.rank}"
            self._writer = threading.Thread(target=self._write, name=name, daemon=True)
            self._writer.start()
        self._news.notify_all()

    def _break(self, connection: TcpSocket) -> None:
        """Ends a connection; the keeper sees it."""
        if self._connection is connection:
            self._connection = None
        hang_up(connection)

    def _write(self) -> None:
        """Sends what could not leave at once."""
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
                if self._connection is connection:
                    self._outbox.wrote(number)

    def _keep(self) -> None:
        """Keeps a connection open until the link is over."""
        with suppress(ProcessGone):
            while not (self._left and self._closing):  # who leaves may still hear the last words
                if self._news_of_end(self._attempts.pause_s()):
                    break
                connection = self._attempts.make(self._agree)
                if connection is None:
                    continue
                began_s, arrived = time.monotonic(), self._outbox.arrived
                with suppress(OSError):
                    self._listen(connection)
                with self._news:
                    self._break(connection)
                if self._outbox.arrived > arrived or time.monotonic() - began_s > LONGEST_PAUSE_S:
                    self._attempts.begin_anew()
        given_up = self._over
        self.give_up()
        if not given_up and not self._left:
            self._membership.lose_receiver(self._to)

    def _news_of_end(self, pause_s: float) -> bool:
        with self._news:
            return self._news.wait_for(lambda: self._over, pause_s)

    def _agree(self, connection: TcpSocket) -> TcpSocket:
        """Begins to use a connection, where the last one ended."""
        said, received = answer(connection, self._identity, self._card, self._number)
        self._left = self._left or said is Answer.ENDED_WELL
        with self._news:
            if said is not Answer.GO_ON or self._over or not self._outbox.arrive(received):
                raise ProcessGone
            self._outbox.rewind()
            self._connection = connection
            self._news.notify_all()
        return connection

    def _listen(self, connection: TcpSocket) -> None:
        """Hears what the receiver says, until the connection ends.

        Raises:
            OSError: it has ended.
        """
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

"""The receiver's end of one link, over as many connections as it takes; see `outgoing_link.py`."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import torch

from polyrhythm.communication.message import (
    HEADER_BYTES,
    Kind,
    MalformedMessage,
    Message,
    decode_header,
)
from polyrhythm.communication.transports.membership import Membership
from polyrhythm.communication.transports.owned_socket import hang_up
from polyrhythm.communication.transports.tcp.attempts import Attempts, ProcessGone
from polyrhythm.communication.transports.tcp.challenge import Answer, Greeted, Hello, hear_greeting
from polyrhythm.communication.transports.tcp.frame_reader import FrameReader
from polyrhythm.communication.transports.tcp.outgoing_link import GOODBYE, WORD
from polyrhythm.communication.transports.tcp.send_handle import MOST_COPIED_BYTES
from polyrhythm.communication.transports.tcp.sockets import TcpSocket

_MOST_UNTOLD, _MOST_UNTOLD_BYTES = 256, 1 << 18
"""Of short messages, before the sender is told that they are here and need not be kept."""


class IncomingTcpLink:
    """The receiver's end.

    When a connection breaks, the sender opens another one, if it lives; whether it does, its listener tells.

    Args:
        hello: of the sender.
        membership: is told what happens on the link.

    Attributes:
        source: the sender.
        over: set when nothing more will come.
    """

    def __init__(self, hello: Hello, membership: Membership) -> None:
        self.source = hello.source
        self.over = threading.Event()
        self._hello = hello
        self._membership = membership
        self._attempts = Attempts(hello.address, hello.port, lambda: membership.patience_s)
        self._news = threading.Condition()
        self._offered: Greeted | None = None
        self._connection: socket.socket | None = None
        self._speaking = threading.Lock()
        self._speaks_on: socket.socket | None = None
        """The connection, once it has been answered: a word before that would be taken for the answer."""
        self._ended: Answer | None = None
        self._leaving = False
        self._received = self._untold = self._untold_bytes = 0

    def offer(self, greeted: Greeted) -> bool:
        """Goes on with another connection of the same link; gives whether it is one."""
        if greeted.hello.link != self._hello.link:
            return False
        with self._news:
            ended = self._ended
            if ended is None:
                if self._connection is not None:
                    hang_up(self._connection)
                self._offered = greeted
                self._news.notify_all()
        if ended is not None:
            with suppress(OSError):
                greeted.answer(ended)
            hang_up(greeted.connection)
        self._attempts.interrupt()
        return True

    def run(self) -> None:
        """Receives until the link is over."""
        ended = Answer.GIVEN_UP
        try:
            while not self._read(self._next_connection()):
                self._attempts.begin_anew()
            ended = Answer.ENDED_WELL
        except ProcessGone:
            pass
        except MalformedMessage as refusal:
            self._membership.refuse(self.source, refusal)
        given_up = self._ended is not None
        self._end(ended)
        self.over.set()
        if ended is Answer.GIVEN_UP and not given_up:
            self._membership.lose(self.source)

    def give_up(self) -> None:
        """Ends the link at once; called on any thread."""
        self._end(Answer.GIVEN_UP)

    def say_goodbye(self) -> None:
        """Tells the sender that this rank is leaving, or has understood that the sender is."""
        self._leaving = True
        self._tell(GOODBYE)

    def _end(self, how: Answer) -> None:
        with self._news:
            self._ended = self._ended or how
            if self._connection is not None:
                hang_up(self._connection)
            if self._offered is not None:
                hang_up(self._offered.connection)
            self._news.notify_all()
        self._attempts.end()

    def _next_connection(self) -> Greeted:
        """Waits for the sender to connect.

        Raises:
            ProcessGone: it will not.
        """
        while True:
            with self._news:
                self._news.wait_for(
                    lambda: self._offered is not None or self._ended is not None, self._attempts.pause_s()
                )
                if self._ended is not None:
                    raise ProcessGone
                if self._offered is not None:
                    greeted, self._offered = self._offered, None
                    self._connection = greeted.connection
                    return greeted
            self._attempts.make(self._look)

    def _look(self, connection: TcpSocket) -> None:
        """Finds out whether the sender's process is still there."""
        name, _ = hear_greeting(connection)
        hang_up(connection)
        if name != self._hello.name:
            raise ProcessGone

    def _read(self, greeted: Greeted) -> bool:
        """Receives over one connection; gives whether the sender has closed the link, or the connection broke."""
        connection = greeted.connection
        try:
            greeted.answer(Answer.GO_ON, self._received)
            self._untold = self._untold_bytes = 0
            self._speaks_on = connection
            if self._leaving:
                self._tell(GOODBYE)
            reader = FrameReader(connection)
            while True:
                context, message = self._receive(reader)
                if message.kind is Kind.CLOSE:
                    self._tell(GOODBYE)
                    return True
                self._membership.deliver(context, self.source, message)
                self._count(message.nbytes)
                del message  # else it would be held until the next one comes
        except OSError:
            return False
        finally:
            with self._news:
                self._connection = self._speaks_on = None
            hang_up(connection)

    def _receive(self, reader: FrameReader) -> tuple[int, Message]:
        context, message = decode_header(reader.take(HEADER_BYTES), most_bytes=self._membership.most_bytes)
        if message.tensor is not None and message.tensor.numel():
            reader.fill(message.tensor.view(torch.uint8).numpy().data)
        return context, message

    def _count(self, nbytes: int) -> None:
        self._received += 1
        self._untold += 1
        self._untold_bytes += nbytes
        long = nbytes > MOST_COPIED_BYTES + HEADER_BYTES
        if long or self._untold >= _MOST_UNTOLD or self._untold_bytes >= _MOST_UNTOLD_BYTES:
            self._tell(self._received)
            self._untold = self._untold_bytes = 0

    def _tell(self, word: int) -> None:
        # If it cannot be told the connection has broken; but more may be there that was sent before.
        with self._speaking, suppress(OSError):
            connection = self._speaks_on
            if connection is not None:
                connection.sendall(WORD.pack(word))

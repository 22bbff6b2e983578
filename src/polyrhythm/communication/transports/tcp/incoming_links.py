"""The receiver's end of the TCP links to one rank: a listener, an acceptor thread, and a reader thread a link.

A link lives over as many connections as it takes; `outgoing_link.py` describes it from the sender's end.
Headers and payloads are read out of the stream of bytes with as few calls of the system as possible.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

import torch

from polyrhythm.communication.message import (
    HEADER_BYTES,
    Kind,
    MalformedMessage,
    Message,
    Reason,
    RefusedMessage,
    decode_header,
)
from polyrhythm.communication.transports.inbox import Target
from polyrhythm.communication.transports.membership import Membership, Peer
from polyrhythm.communication.transports.sockets import (
    TcpSocket,
    accept_next,
    hang_up,
    listen,
    receive_into,
    tune,
)
from polyrhythm.communication.transports.tcp.handshake import (
    REFUSAL,
    Answer,
    Attempts,
    Greeted,
    Hello,
    Identity,
    ProcessExited,
    TcpCard,
    challenge,
    receive_greeting,
)
from polyrhythm.communication.transports.tcp.outgoing_link import GOODBYE, MOST_COPIED_BYTES, WORD

_BUFFER_BYTES = 1 << 16
_LEAST_DIRECT_BYTES = 1 << 17
"""A smaller payload is copied in less time than it takes to find the receive that waits for it."""


class FrameReader:
    """Reads from one connection; short pieces are read many at a time, long ones straight to their destination.

    Args:
        connection: blocks without a limit of time.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0

    def take(self, length: int) -> bytes:
        """Return the next bytes.

        Args:
            length: number of bytes; fewer than the buffer has.

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
        """Fill a piece of memory with the next bytes; raise what `take` raises."""
        ready = min(len(target), self._end - self._start)
        target[:ready] = self._buffer[self._start : self._start + ready]
        self._advance(ready)
        receive_into(self._connection, target[ready:])

    def _advance(self, length: int) -> None:
        self._start += length
        if self._start == self._end:
            self._start = self._end = 0


_MOST_UNTOLD, _MOST_UNTOLD_BYTES = 256, 1 << 18
"""Unacknowledged short messages after which the sender is notified, so that it need not keep them."""


class IncomingTcpLink:
    """The receiver's end.

    When a connection breaks, a living sender opens another one; its listener shows whether it lives.

    Attributes:
        source: the sender.
        over: set after the last message.
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
        """Continue with another connection of the same link; return whether it is one."""
        if greeted.hello.link != self._hello.link:
            return False
        with self._news:
            ended = self._ended
            if ended is None:
                # The sender has given the old connection up, though it may look alive from here.
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
        """Receive until the link is over."""
        ended = Answer.GIVEN_UP
        try:
            while not self._read(self._next_connection()):
                self._attempts.begin_again()
            ended = Answer.ENDED_WELL
        except ProcessExited:
            pass
        except MalformedMessage as refusal:
            self._membership.refuse(self.source, refusal)
        given_up = self._ended is not None
        self._end(ended)
        self.over.set()
        if ended is Answer.GIVEN_UP and not given_up:
            self._membership.lose(self.source)

    def give_up(self) -> None:
        """End the link at once; called on any thread."""
        self._end(Answer.GIVEN_UP)

    def announce_exit(self) -> None:
        """Notify the sender that this rank is leaving, or has understood that the sender is."""
        self._leaving = True
        self._notify(GOODBYE)

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
        """Wait for the sender to connect; raise `ProcessExited` if it will not."""
        while True:
            with self._news:
                self._news.wait_for(
                    lambda: self._offered is not None or self._ended is not None, self._attempts.pause_s()
                )
                if self._ended is not None:
                    raise ProcessExited
                if self._offered is not None:
                    greeted, self._offered = self._offered, None
                    self._connection = greeted.connection
                    return greeted
            self._attempts.make(self._look)

    def _look(self, connection: TcpSocket) -> None:
        """Find out whether the sender's process is still there."""
        name, _ = receive_greeting(connection)
        hang_up(connection)
        if name != self._hello.name:
            raise ProcessExited

    def _read(self, greeted: Greeted) -> bool:
        """Receive over one connection; return whether the sender has closed the link, or the connection broke."""
        connection = greeted.connection
        try:
            greeted.answer(Answer.GO_ON, self._received)
            self._untold = self._untold_bytes = 0
            self._speaks_on = connection
            if self._leaving:
                self._notify(GOODBYE)
            reader = FrameReader(connection)
            while True:
                context, message, target = self._receive(reader, connection)
                if message.kind is Kind.CLOSE:
                    self._notify(GOODBYE)
                    return True
                self._membership.deliver(context, self.source, message, target)
                self._count(message.nbytes)
                del message, target  # else it would be held until the next one arrives
        except OSError:
            return False
        finally:
            with self._news:
                self._connection = self._speaks_on = None
            hang_up(connection)

    def _receive(self, reader: FrameReader, connection: socket.socket) -> tuple[int, Message, Target | None]:
        context, message = decode_header(reader.take(HEADER_BYTES), most_bytes=self._membership.most_bytes)
        target, tensor = None, message.tensor
        if tensor is None or not tensor.numel():
            return context, message, None
        if message.nbytes > _LEAST_DIRECT_BYTES:
            target = self._membership.target(context, self.source, message, lambda: hang_up(connection))
        if target is not None:
            tensor = target.tensor
            message = message._replace(tensor=tensor)
        try:
            reader.fill(tensor.detach().view(torch.uint8).numpy().data)
        except BaseException:
            if target is not None:
                self._membership.release(target)
            raise
        return context, message, target

    def _count(self, nbytes: int) -> None:
        self._received += 1
        self._untold += 1
        self._untold_bytes += nbytes
        # Short messages are acknowledged many at a time; a long one at once, since its tensor is lent until then.
        long = nbytes > MOST_COPIED_BYTES + HEADER_BYTES
        if long or self._untold >= _MOST_UNTOLD or self._untold_bytes >= _MOST_UNTOLD_BYTES:
            self._notify(self._received)
            self._untold = self._untold_bytes = 0

    def _notify(self, count: int) -> None:
        # If it fails, the connection has broken; but messages sent before may still be there.
        with self._speaking, suppress(OSError):
            connection = self._speaks_on
            if connection is not None:
                connection.sendall(WORD.pack(count))


_MOST_STRANGERS = 256
"""Limit on unauthenticated connections; above it, the oldest is closed."""

_ENDING_S = 1.0
_NOBODY = Peer(-1, 0)


class IncomingTcpLinks:
    """All links to one rank.

    Args:
        key: key of the run; may be empty.

    Attributes:
        identity: identity of this process in its links; its card is for the senders.

    Raises:
        OSError: no port is to be had.
    """

    def __init__(self, own: Peer, address: str, key: bytes, membership: Membership) -> None:
        self._listener = listen(address)
        bound, port = self._listener.getsockname()[:2]
        self.identity = Identity(own, TcpCard.draw(bound, port), key)
        self._membership = membership
        self._lock = threading.Lock()
        self._links: dict[Peer, IncomingTcpLink] = {}
        self._strangers: dict[TcpSocket, None] = {}
        self._threads: set[threading.Thread] = set()
        self._acceptor = threading.Thread(target=self._accept, name="acceptor", daemon=True)
        self._acceptor.start()

    def close(self, patience_s: float) -> None:
        """Stop accepting, send a goodbye, and wait for the senders' last messages."""
        deadline_s = time.monotonic() + patience_s
        for link in self._all():
            link.announce_exit()
        for link in self._all():
            link.over.wait(max(0.0, deadline_s - time.monotonic()))
        hang_up(self._listener)
        self._acceptor.join(patience_s)
        self._listener.close()  # further connections are refused at once
        with self._lock:
            for connection in self._strangers:
                hang_up(connection)
        for link in self._all():
            link.give_up()
        for thread in self._threads:
            thread.join(_ENDING_S)

    def wait_for_deliveries(self, source: Peer, patience_s: float) -> None:
        """Return when all that a sender sent before it left has been delivered, if that is soon."""
        link = self._links.get(source)
        if link is not None:
            link.over.wait(patience_s)

    def give_up(self, source: Peer) -> None:
        """Take nothing more from a sender."""
        link = self._links.get(source)
        if link is not None:
            link.give_up()

    def _all(self) -> list[IncomingTcpLink]:
        with self._lock:
            return list(self._links.values())

    def _accept(self) -> None:
        while (connection := accept_next(self._listener)) is not None:
            with self._lock:
                self._strangers[connection] = None
                if len(self._strangers) > _MOST_STRANGERS:
                    hang_up(next(iter(self._strangers)))
            thread = threading.Thread(target=self._serve, args=(connection,), name="reader", daemon=True)
            thread.start()
            self._threads = {each for each in self._threads if each.is_alive()} | {thread}
            del connection  # it is the reader's

    def _serve(self, connection: TcpSocket) -> None:
        # Here and not in the acceptor: a silent connection must not keep others out.
        link = self._begin(connection)
        del connection
        if link is not None:
            threading.current_thread().name = f"from {link.source.rank}"
            link.run()

    def _begin(self, connection: TcpSocket) -> IncomingTcpLink | None:
        """Return the link that a connection begins, if it begins one."""
        source = _NOBODY
        try:
            tune(connection)
            greeted = challenge(connection, self.identity)
            if greeted is not None:
                source = greeted.hello.source
                return self._admit(greeted)
        except RefusedMessage as refusal:
            self._membership.refuse(source, refusal)
            with suppress(OSError):
                connection.sendall(REFUSAL)
        except OSError:
            pass
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
        hang_up(connection)
        return None

    def _admit(self, greeted: Greeted) -> IncomingTcpLink | None:
        """Return a new link; None where an old one continues, or its sender is lost.

        Raises:
            RefusedMessage: the sender is not the rank that it claims to be.
        """
        source, known = greeted.hello.source, self._membership
        if not greeted.proved:
            raise RefusedMessage(Reason.SENDER, "it does not know the key of this run")
        with self._lock:
            link = self._links.get(source)
            if link is not None:
                if not link.offer(greeted):
                    raise RefusedMessage(Reason.SENDER, "it has a link already, so this one is a stranger's")
                return None
            lost = known.is_lost(source.rank) and source.generation <= known.generation(source.rank)
            if not lost:
                known.admit(source)
                link = self._links[source] = IncomingTcpLink(greeted.hello, known)
        if link is None:
            with suppress(OSError):
                greeted.answer(Answer.GIVEN_UP)
            hang_up(greeted.connection)
            return None
        link.offer(greeted)
        known.greet(source)
        return link

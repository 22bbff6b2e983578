"""Where links to one rank arrive: a listener, an acceptor thread, and a reader thread a link."""

from __future__ import annotations

import errno
import threading
import time
from contextlib import suppress

from polyrhythm.communication.message import Reason, RefusedMessage
from polyrhythm.communication.transports.membership import Membership, Peer
from polyrhythm.communication.transports.owned_socket import hang_up
from polyrhythm.communication.transports.tcp.card import Identity, TcpCard
from polyrhythm.communication.transports.tcp.challenge import (
    REFUSAL,
    Answer,
    Greeted,
    challenge,
)
from polyrhythm.communication.transports.tcp.incoming_link import IncomingTcpLink
from polyrhythm.communication.transports.tcp.sockets import TcpSocket, listen, tune

_MOST_STRANGERS = 256
"""Connections that have not proved yet whose they are; if there are more, the oldest is hung up on."""

_PAUSE_S, _ENDING_S = 0.1, 1.0
_NOBODY = Peer(-1, 0)


class IncomingTcpLinks:
    """All links to one rank.

    Args:
        own: this process.
        address: of this host, as the others reach it.
        key: of the run; may be empty.
        membership: is told what happens on the links.

    Attributes:
        identity: this process, as its links tell it; its card is for the senders.

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
        """Stops accepting, says goodbye and waits for the senders' last words."""
        deadline_s = time.monotonic() + patience_s
        for link in self._all():
            link.say_goodbye()
        for link in self._all():
            link.over.wait(max(0.0, deadline_s - time.monotonic()))
        hang_up(self._listener)
        self._acceptor.join(patience_s)
        self._listener.close()  # who still connects is refused at once
        with self._lock:
            for connection in self._strangers:
                hang_up(connection)
        for link in self._all():
            link.give_up()
        for thread in self._threads:
            thread.join(_ENDING_S)

    def wait_for_last_words(self, source: Peer, patience_s: float) -> None:
        """Returns when all that a sender sent before it left has been delivered, if that is soon."""
        link = self._links.get(source)
        if link is not None:
            link.over.wait(patience_s)

    def give_up(self, source: Peer) -> None:
        """Takes nothing more from a sender."""
        link = self._links.get(source)
        if link is not None:
            link.give_up()

    def _all(self) -> list[IncomingTcpLink]:
        with self._lock:
            return list(self._links.values())

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept_one()
            except OSError as error:
                if error.errno == errno.EINVAL:  # it has been shut down
                    return
                time.sleep(_PAUSE_S)  # too many open files: some may be closed soon
                continue
            with self._lock:
                self._strangers[connection] = None
                if len(self._strangers) > _MOST_STRANGERS:
                    hang_up(next(iter(self._strangers)))
            thread = threading.Thread(target=self._hear, args=(connection,), name="reader", daemon=True)
            thread.start()
            self._threads = {each for each in self._threads if each.is_alive()} | {thread}
            del connection  # it is the reader's

    def _hear(self, connection: TcpSocket) -> None:
        # Here and not in the acceptor: who connects and says nothing must not keep others out.
        link = self._begin(connection)
        del connection
        if link is not None:
            threading.current_thread().name = f"from {link.source.rank}"
            link.run()

    def _begin(self, connection: TcpSocket) -> IncomingTcpLink | None:
        """Gives the link that a connection begins, if it begins one."""
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
        """Gives a new link; None where an old one goes on, or its sender is lost.

        Raises:
            RefusedMessage: it is not whose it says it is.
        """
        source, known = greeted.hello.source, self._membership
        if not greeted.proved:
            raise RefusedMessage(Reason.SENDER, "it does not know the key of this run")
        with self._lock:
            link = self._links.get(source)
            if link is not None:
                if not link.offer(greeted):
                    raise RefusedMessage(
                        Reason.SENDER, "it has a link already, so this one is somebody else's"
                    )
                return None
            lost = known.is_lost(source.rank) and source.incarnation <= known.incarnation(source.rank)
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

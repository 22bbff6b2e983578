"""The receiver's end of a link, while a connection begins."""

from __future__ import annotations

import socket
import threading
import time

from polyrhythm.communication.message import Kind, Message, encode_header
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.sockets import receive_exactly
from polyrhythm.communication.transports.tcp.handshake import (
    Answer,
    Greeted,
    Identity,
    ProcessExited,
    TcpCard,
    answer,
    challenge,
)
from polyrhythm.communication.transports.tcp.incoming_links import IncomingTcpLink
from polyrhythm.communication.transports.tcp.outgoing_link import GOODBYE, WORD
from unit.communication.transports.heard import PATIENCE_S, Heard

LINK = bytes(range(16))
SENDER = Identity(Peer(2, 0), TcpCard.draw("127.0.0.1", 1), b"k" * 32)
RECEIVER = Identity(Peer(0, 0), TcpCard.draw("127.0.0.1", 2), b"k" * 32)


class Meeting:
    """A sender that asks for a link, on a thread of its own."""

    def __init__(self, near: socket.socket) -> None:
        self.verdict: object = None
        self._near = near
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            self.verdict = answer(self._near, SENDER, RECEIVER.card, LINK)
        except (ProcessExited, OSError) as error:
            self.verdict = error

    def result(self) -> object:
        self._thread.join(PATIENCE_S)
        return self.verdict


def test_who_leaves_while_a_connection_begins_says_goodbye_behind_the_answer() -> None:
    near, far = socket.socketpair()
    with near, far:
        meeting = Meeting(near)
        greeted = challenge(far, RECEIVER)
        assert greeted is not None
        link = IncomingTcpLink(greeted.hello, Heard())

        class Late(Greeted):
            """Is about to be answered when the receiver begins to leave."""

            def answer(self, answer: Answer, received: int = 0) -> None:
                link.announce_exit()
                super().answer(answer, received)

        assert link.offer(Late(**vars(greeted)))
        receiver = threading.Thread(target=link.run, daemon=True)
        receiver.start()
        assert meeting.result() == (Answer.GO_ON, 0)
        word = receive_exactly(near, WORD.size, time.monotonic() + PATIENCE_S)
        assert WORD.unpack(word) == (GOODBYE,)

        near.settimeout(PATIENCE_S)
        near.sendall(encode_header(Message(Kind.CLOSE), 0))
        receiver.join(PATIENCE_S)
        assert link.over.is_set()

"""Connection of a TCP link: attempts to reach the listener, and the handshake of both sides.

A listener leaves its card (`TcpCard`) in the store. Both sides prove that they know the secret, and agree
where to continue:

    receiver                                                        sender
      greeting: name of the listener, nonce r ────────────────────▶
      ◀── hello: rank, link, own listener, nonce s, proof("sender", name, r, s, all of that)
      verdict: whether, messages that I have, proof("receiver", s, r, all of that) ▶

The secret is the run's key and the receiver's token, which is in the store. Everything has a fixed length,
and nothing else is taken before.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from errno import EMFILE, ENFILE
from typing import TypeVar

from polyrhythm.communication.message import MalformedMessage
from polyrhythm.communication.secret import NONCE_BYTES, PROOF_BYTES, nonce, prove, proves
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.sockets import TcpSocket, dial, hang_up, receive_exactly

NAME_BYTES = 16


@dataclass(frozen=True)
class TcpCard:
    """Address of a rank's listener; left in the store for the others.

    Attributes:
        address: address of its host.
        port: TCP port of its listener.
        name: hexadecimal, of the listener: random, so that another process on the same port later has another one.
        token: hexadecimal; a process that opens a link must know it.
    """

    address: str
    port: int
    name: str
    token: str = field(repr=False)

    @classmethod
    def draw(cls, address: str, port: int) -> TcpCard:
        """Make the card of a new listener."""
        return cls(address, port, secrets.token_hex(NAME_BYTES), secrets.token_hex(NAME_BYTES))

    def to_text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> TcpCard:
        """Parse the text that `to_text` returned."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Identity:
    """Identity of this process in its links.

    Attributes:
        own: number of the process.
        card: address of its listener.
        key: key of the run; may be empty.
    """

    own: Peer
    card: TcpCard
    key: bytes = field(default=b"", repr=False)


_FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 1.0
_Found = TypeVar("_Found")
_log = logging.getLogger(__name__)


class ProcessExited(Exception):
    """The process that was meant is not there any more, does without this one, or cannot be reached for too long."""


class Attempts:
    """Attempts to reach a listener.

    A refusal is final: the listener is open for as long as its process lives. So is another process at its
    port. Without an answer, the network may be cut: there is another attempt after a pause, each pause twice
    as long as the one before, until the patience is over. A host that answers while its process does not (it
    is stopped) does not use up the patience: a watchdog must decide.

    Args:
        address: address of its host.
        port: TCP port of it.
        patience_s: function that returns how long there may be no way to it.
    """

    def __init__(self, address: str, port: int, patience_s: Callable[[], float]) -> None:
        self._address = address
        self._port = port
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._socket: TcpSocket | None = None
        self._over = False
        self.begin_again()

    def begin_again(self) -> None:
        """Let the next attempt follow at once, and count patience from now."""
        self._began_s, self._pause_s = time.monotonic(), 0.0

    def pause_s(self) -> float:
        """Return how long to wait before the next attempt, nothing before the first.

        Raises:
            ProcessExited: patience is over, or another thread has ended the attempts.
        """
        if self._over or time.monotonic() - self._began_s > self._patience_s():
            raise ProcessExited
        pause_s = self._pause_s
        self._pause_s = min(LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * pause_s))
        return pause_s

    def make(self, talk: Callable[[TcpSocket], _Found]) -> _Found | None:
        """Make one attempt; return the result of the talk, None if it broke and there may be another attempt.

        Raises:
            ProcessExited: no process listens there any more, or `talk` finds another one.
        """
        try:
            connection = dial(self._address, self._port, self._hold)
        except ConnectionRefusedError:
            raise ProcessExited from None
        except OSError as error:
            if error.errno in (EMFILE, ENFILE):
                _log.warning(
                    "no connection can be opened (%s): raise the limit, for instance with ulimit -n",
                    error.strerror,
                )
            return None
        try:
            return talk(connection)
        except TimeoutError:
            self._began_s = time.monotonic()
        except OSError:
            pass
        return None

    def interrupt(self) -> None:
        """End an attempt that is being made; called on any thread."""
        with self._lock:
            if self._socket is not None:
                hang_up(self._socket)
                self._socket = None

    def end(self) -> None:
        """Make sure that there is no further attempt."""
        self._over = True
        self.interrupt()

    def _hold(self, connection: TcpSocket) -> None:
        with self._lock:
            self._socket = connection
            if self._over:
                raise ConnectionAbortedError


PATIENCE_S = 30.0
"""With the other side: a process that lives answers at once, unless it is stopped."""

_MAGIC = b"pRhL"
_GREETING = struct.Struct(f"<4s{NAME_BYTES}s{NONCE_BYTES}s")
_HELLO = struct.Struct(f"<4sqq{NAME_BYTES}s{NAME_BYTES}sH64s")
_VERDICT = struct.Struct("<BQ")
_FROM_SENDER, _FROM_RECEIVER = "link, sender", "link, receiver"
HELLO_BYTES = _HELLO.size + NONCE_BYTES + PROOF_BYTES
REFUSAL = bytes(_VERDICT.size + PROOF_BYTES)
"""A verdict that proves nothing, for a caller that has proved nothing."""


class Answer(IntEnum):
    """Verdict on a connection."""

    GO_ON = 0
    ENDED_WELL = 1  # the link that it is for has been closed
    GIVEN_UP = 2  # its sender counts as lost


@dataclass(frozen=True)
class Hello:
    """Introduction of a sender.

    Attributes:
        source: the sender.
        link: drawn when the link was made; the same on all its connections.
        name: name of its own listener.
        address: address of its own listener, which the receiver asks whether it still lives.
        port: TCP port of its own listener.
    """

    source: Peer
    link: bytes
    name: bytes
    address: str
    port: int

    def to_bytes(self) -> bytes:
        """Return it packed."""
        return _HELLO.pack(_MAGIC, *self.source, self.link, self.name, self.port, self.address.encode())

    @classmethod
    def from_bytes(cls, packed: bytes) -> Hello:
        """Unpack it; raise `MalformedMessage` if it is something else."""
        magic, rank, generation, link, name, port, address = _HELLO.unpack(packed)
        if magic != _MAGIC or not address.isascii():
            raise MalformedMessage("a link began with bytes of something else")
        return cls(Peer(rank, generation), link, name, address.rstrip(b"\0").decode(), port)


@dataclass(frozen=True)
class Greeted:
    """A connection with an introduced sender that waits for a verdict.

    Attributes:
        connection: blocks without a limit of time.
        hello: introduction of the sender.
        proved: whether it knows the secret; if not, the introduction must not be trusted.
    """

    connection: socket.socket
    hello: Hello
    proved: bool
    secret: bytes
    nonces: tuple[bytes, bytes]

    def answer(self, answer: Answer, received: int = 0) -> None:
        """Return what becomes of the connection, and how many messages of the link have been received.

        Raises:
            OSError: it broke.
        """
        verdict = _VERDICT.pack(answer, received)
        ours, theirs = self.nonces
        proof = prove(self.secret, _FROM_RECEIVER, theirs, ours, verdict)
        self.connection.sendall(verdict + proof)


def challenge(connection: socket.socket, identity: Identity) -> Greeted | None:
    """Run the receiver's side; return None for a sender that closes the connection without a hello.

    Raises:
        MalformedMessage: the received bytes are no hello.
        OSError: the connection broke, or the sender takes too long.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    ours, name = nonce(), bytes.fromhex(identity.card.name)
    connection.settimeout(PATIENCE_S)
    connection.sendall(_GREETING.pack(_MAGIC, name, ours))
    reply = receive_exactly(connection, HELLO_BYTES, deadline_s)
    if not reply:
        return None
    if len(reply) < HELLO_BYTES:
        raise MalformedMessage(f"a link began with {len(reply)} bytes, not {HELLO_BYTES}")
    packed, theirs, proof = _parts(reply, _HELLO.size)
    hello, secret = Hello.from_bytes(packed), _secret(identity.key, identity.card)
    proved = proves(proof, secret, _FROM_SENDER, name, ours, theirs, packed)
    connection.settimeout(None)
    return Greeted(connection, hello, proved, secret, (ours, theirs))


def answer(connection: socket.socket, identity: Identity, card: TcpCard, link: bytes) -> tuple[Answer, int]:
    """The sender's side; gives the receiver's verdict, and how many messages of the link it has.

    Args:
        connection: connection to the receiver.
        identity: identity of the sender.
        card: card of the receiver.
        link: see `Hello`.

    Raises:
        ProcessExited: another process listens there, or it refuses, or it does not know the secret.
        OSError: the connection broke, or the receiver takes too long.
    """
    name, theirs = receive_greeting(connection)
    if name != bytes.fromhex(card.name):
        raise ProcessExited
    own, secret, ours = identity.card, _secret(identity.key, card), nonce()
    hello = Hello(identity.own, link, bytes.fromhex(own.name), own.address, own.port).to_bytes()
    connection.sendall(hello + ours + prove(secret, _FROM_SENDER, name, theirs, ours, hello))
    reply = receive_exactly(connection, _VERDICT.size + PROOF_BYTES, time.monotonic() + PATIENCE_S)
    verdict, proof = reply[: _VERDICT.size], reply[_VERDICT.size :]
    if len(reply) < _VERDICT.size + PROOF_BYTES:
        raise ConnectionError("the receiver has hung up")
    if not proves(proof, secret, _FROM_RECEIVER, ours, theirs, verdict):
        raise ProcessExited
    connection.settimeout(None)
    reply, received = _VERDICT.unpack(verdict)
    return Answer(reply), received


def receive_greeting(connection: socket.socket) -> tuple[bytes, bytes]:
    """Return the name of the listener at the other end, and its nonce.

    Raises:
        ProcessExited: something else listens there.
        OSError: the connection broke, or the greeting takes too long.
    """
    greeting = receive_exactly(connection, _GREETING.size, time.monotonic() + PATIENCE_S)
    if len(greeting) < _GREETING.size:
        raise ConnectionError("the receiver has hung up")
    magic, name, theirs = _GREETING.unpack(greeting)
    if magic != _MAGIC:
        raise ProcessExited
    return name, theirs


def is_reachable(card: TcpCard, patience_s: float, gone: Callable[[], bool]) -> bool:
    """Return whether a connection to a rank's listener can be opened; also true if its process ends in the meantime.

    Args:
        card: card of the rank.
        patience_s: seconds after which the last attempt may begin.
        gone: returns whether the process is known to be gone.
    """
    deadline_s, pause_s = time.monotonic() + patience_s, _FIRST_PAUSE_S
    while not gone():
        if time.monotonic() > deadline_s:
            return False
        with suppress(OSError, ProcessExited):
            connection = dial(card.address, card.port, lambda _: None)
            try:
                receive_greeting(connection)
                return True
            except TimeoutError:  # its host answers, and a watchdog decides about its process
                return True
            finally:
                hang_up(connection)
        time.sleep(pause_s)
        pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
    return True


def _parts(reply: bytes, first: int) -> tuple[bytes, bytes, bytes]:
    return reply[:first], reply[first : first + NONCE_BYTES], reply[first + NONCE_BYTES :]


def _secret(key: bytes, card: TcpCard) -> bytes:
    return key + bytes.fromhex(card.token)

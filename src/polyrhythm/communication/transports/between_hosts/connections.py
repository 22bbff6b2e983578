"""Connections between the members of a communicator: how they are made, used, and found to be cut off.

Each member connects with every other by one TCP connection:

    member k                       store                       member j < k
    listens ── address, nonce ──▶ all members' ◀── address, nonce ─ listens
    connects ────────────── k, proof("joins", …) ─────────────▶ accepts
           ◀───────────────── proof("accepts", …) ────────────

Nonces are drawn each time and proofs made with the run's key, so a process that does not know it does not get in;
where a run has no key, a process that can read the store gets in, and no other.

A connection (`Stream`) never blocks the thread that uses it. `Silence` detects a host at its other end that
is cut off and acknowledges nothing:

    sent ──▶ answered by the other host's kernel, be its process stopped or busy: all is well
        ──▶ sent again, and again, and no answer for as long as there is patience: cut off
    nothing to send: the kernel's own probes (keepalive) end the connection after as long

`TCP_USER_TIMEOUT` would do the former as well, but also ends connections with a live peer that reads
nothing, as a process that is stopped; and links are opened again where they break, but collectives are not.
"""

from __future__ import annotations

import heapq
import json
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from polyrhythm.communication.secret import PROOF_BYTES, nonce, prove, proves
from polyrhythm.communication.transports.between_hosts.addition import HEADER_BYTES, Frame, Outgoing
from polyrhythm.communication.transports.member_collectives import CollectiveBroken
from polyrhythm.communication.transports.sockets import (
    END_OF_RECORD,
    RECORD_BYTES,
    TcpSocket,
    hang_up,
    listen,
)

_JOINS, _ACCEPTS = "collectives, joins", "collectives, accepts"
_NUMBER_BYTES = 4
_CLAIM_BYTES = _NUMBER_BYTES + PROOF_BYTES
_MOST_STRANGERS, _LEAST_SILENCE_S = 64, 1.0
_PATIENCE_S = 60.0
_LOOK_EVERY_MS = 100


@dataclass(frozen=True)
class Place:
    """Address at which a member meets the others.

    Attributes:
        member: index of this member.
        address: address of this host, as the others reach it.
        key: key of the run; may be empty.
        check: function that raises the error that ends the meeting, such as a failed rank.
    """

    member: int
    address: str
    key: bytes
    check: Callable[[], None]


def connect_all(place: Place, exchange_texts: Callable[[str], Sequence[str]]) -> dict[int, TcpSocket]:
    """Connect this member with all others; all call it.

    Args:
        place: place of this member.
        exchange_texts: function that publishes a text to all members and returns their texts, in the order of members.

    Raises:
        CollectiveBroken: a member is missing, or its connection breaks.
    """
    try:
        with listen(place.address) as listener:
            ours = nonce()
            word = json.dumps([place.address, listener.getsockname()[1], ours.hex()])
            cards = [json.loads(each) for each in exchange_texts(word)]
            return _Meeting(place, listener, cards).connections()
    except OSError as error:
        raise CollectiveBroken(f"a connection between hosts was not made: {error}") from None


class _Meeting:
    def __init__(self, place: Place, listener: TcpSocket, cards: list[tuple[str, int, str]]) -> None:
        self._place = place
        self._listener = listener
        self._cards = cards
        self._nonces = [bytes.fromhex(card[2]) for card in cards]
        self._deadline = time.monotonic() + _PATIENCE_S

    def connections(self) -> dict[int, TcpSocket]:
        own = self._place.member
        # Lower numbers are joined, higher ones accepted. The kernel completes a connection before its owner accepts it,
        # so all members may join first; the answers to their proofs are read last, and none waits in a circle.
        joined = {other: self._join(other) for other in range(own)}
        found = self._accept(len(self._cards) - own - 1)
        for other, connection in joined.items():
            if not self._proves(self._receive(connection, PROOF_BYTES), _ACCEPTS, own, other):
                raise ConnectionError("it does not know the key of this run")
            found[other] = connection
        return found

    def _join(self, other: int) -> TcpSocket:
        address, port, _ = self._cards[other]
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        connection = TcpSocket(family)
        connection.settimeout(_PATIENCE_S)
        connection.connect(where)
        own = self._place.member
        connection.sendall(own.to_bytes(_NUMBER_BYTES, "big") + self._proof(_JOINS, own, other))
        return connection

    def _accept(self, count: int) -> dict[int, TcpSocket]:
        """Accept members in order of arrival; silent strangers do not delay them."""
        found: dict[int, TcpSocket] = {}
        strangers: dict[int, tuple[TcpSocket, bytearray, float]] = {}  # by their descriptors, oldest first
        ready = select.poll()

        def reject(descriptor: int) -> None:
            ready.unregister(descriptor)
            strangers.pop(descriptor)[0].close()

        while len(found) < count:
            if len(strangers) == _MOST_STRANGERS:
                # A member introduces itself at once, and does not return if it is sent away.
                oldest, (_, _, since_s) = next(iter(strangers.items()))
                if time.monotonic() - since_s < _LEAST_SILENCE_S:
                    with suppress(KeyError):
                        ready.unregister(self._listener)
                else:
                    reject(oldest)
            if len(strangers) < _MOST_STRANGERS:
                ready.register(self._listener, select.POLLIN)
            for descriptor in self._await(ready):
                if descriptor == self._listener.fileno():
                    connection = self._listener.accept_one()
                    connection.setblocking(False)
                    strangers[connection.fileno()] = connection, bytearray(), time.monotonic()
                    ready.register(connection, select.POLLIN)
                elif descriptor in strangers:
                    connection, claim, _ = strangers[descriptor]
                    received = b""
                    with suppress(OSError):
                        received = connection.recv(_CLAIM_BYTES - len(claim))
                    claim += received
                    if received and len(claim) < _CLAIM_BYTES:
                        continue
                    other, own = int.from_bytes(claim[:_NUMBER_BYTES], "big"), self._place.member
                    expected = own < other < len(self._cards) and other not in found
                    if expected and self._proves(bytes(claim[_NUMBER_BYTES:]), _JOINS, other, own):
                        ready.unregister(descriptor)
                        del strangers[descriptor]
                        found[other] = connection
                        with suppress(OSError):  # it has gone: the first collective will find out
                            connection.sendall(self._proof(_ACCEPTS, other, own))
                    else:
                        reject(descriptor)
        for descriptor in list(strangers):
            reject(descriptor)
        return found

    def _proof(self, purpose: str, joins: int, accepts: int) -> bytes:
        return prove(self._place.key, purpose, self._nonces[joins], self._nonces[accepts])

    def _proves(self, proof: bytes, purpose: str, joins: int, accepts: int) -> bool:
        return proves(proof, self._place.key, purpose, self._nonces[joins], self._nonces[accepts])

    def _receive(self, connection: TcpSocket, count: int) -> bytes:
        content = b""
        ready = select.poll()
        ready.register(connection, select.POLLIN)
        while len(content) < count:
            if not self._await(ready):
                continue
            received = connection.recv(count - len(content))
            if not received:
                raise ConnectionError("the other end was closed")
            content += received
        return content

    def _await(self, ready: select.poll) -> list[int]:
        """Wait for a while until something can be read; return of what."""
        found = ready.poll(_LOOK_EVERY_MS)
        if not found:
            self._place.check()
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"a rank did not connect within {_PATIENCE_S:g} s")
        return [descriptor for descriptor, _ in found]


_INFO = struct.Struct("=8B13I")
"""The beginning of Linux's `struct tcp_info`, up to the time of the last acknowledgement."""

_PROBES, _UNANSWERED, _LAST_ANSWER = 3, 8 + 4, 8 + 12
_KEEPALIVES = 4


class Sign(NamedTuple):
    """State of a connection in the kernel.

    Attributes:
        unanswered: whether something that has been sent, or a probe of a full window, has no answer yet.
        answered_s: seconds since the last answer.
    """

    unanswered: bool
    answered_s: float


def read_sign(info: bytes) -> Sign:
    """Read a `struct tcp_info`."""
    found = _INFO.unpack_from(info)
    return Sign(bool(found[_UNANSWERED] or found[_PROBES]), found[_LAST_ANSWER] / 1000)


class Silence:
    """Watches one connection.

    Args:
        patience_s: longest silence.
    """

    def __init__(self, connection: socket.socket, patience_s: float) -> None:
        self._connection = connection
        self._patience_s = patience_s
        self._since_s: float | None = None
        every_s = max(1, round(patience_s / _KEEPALIVES))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", every_s),
            ("TCP_KEEPINTVL", every_s),
            ("TCP_KEEPCNT", _KEEPALIVES - 1),
        ):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def lasts_too_long(self, now_s: float) -> bool:
        """Look once; called again and again while something is awaited.

        Args:
            now_s: seconds on any running clock.
        """
        if not hasattr(socket, "TCP_INFO"):
            return False
        info = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        return self.judge(read_sign(info), now_s)

    def judge(self, sign: Sign, now_s: float) -> bool:
        """Return whether the silence lasts too long, given the kernel's sign of now."""
        if not sign.unanswered:
            self._since_s = None
            return False
        if self._since_s is None or now_s - sign.answered_s > self._since_s:  # answered since
            self._since_s = now_s
        return now_s - self._since_s > self._patience_s


PATIENCE_S = 60.0
"""Without an answer of another host; as long as links have without any way to it."""

_MOST_ASLEEP_BYTES = 128 << 10
_MOST_READS, _MOST_WRITES = 16, 64
"""At a time: then others have their turn."""


class Sink(Protocol):
    """Receiver of frames."""

    def target(self, source: int, frame: Frame) -> memoryview:
        """Return where a frame's bytes belong."""

    def arrived(self, source: int, frame: Frame) -> None:
        """Called when they are there."""


class Stream:
    """One member's end of the connection to another.

    Frames of earlier collectives leave first, whenever they are added.

    Args:
        sink: receiver of the frames.
        sent: callback with every frame that has left.
        patience_s: seconds for which sent data may be unacknowledged.
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
        # A heap: by the number of the collective, then in the order of adding; frames are never compared.
        self._queue: list[tuple[int, int, Outgoing]] = []
        self._queued = 0
        self._leaving: Outgoing | None = None
        self._sent_bytes = 0  # of the departing payload; negative: of its header
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._header_received = 0
        self._frame: Frame | None = None
        self._payload = memoryview(b"")
        self._wakes_at = 1

    @property
    def backlog(self) -> bool:
        """Whether there is something to send."""
        return self._leaving is not None or bool(self._queue)

    def add(self, frame: Outgoing) -> None:
        """Put a frame in its place among those to send."""
        self._queued += 1
        heapq.heappush(self._queue, (frame.addition.number, self._queued, frame))

    def send_on(self) -> None:
        """Send as much as the system takes; raise `OSError` if the connection broke."""
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
        """Receive the available bytes.

        Raises:
            OSError: the connection broke.
            EOFError: the other member has closed it.
        """
        for _ in range(_MOST_READS):
            # The rest of a payload and the header behind it, in one call of the system.
            room = [self._payload, self._header[self._header_received :]]
            try:
                received = self.connection.recvmsg_into(room if self._payload else room[1:])[0]
            except BlockingIOError:
                break
            if not received:
                raise EOFError
            self._take(received)
            if received < len(room[0]) + len(room[1]):
                break
        # A wake-up for every packet of a long payload would take the core from the rank's compute.
        self._sleep_until(min(_MOST_ASLEEP_BYTES, max(1, len(self._payload))))

    def is_cut_off(self) -> bool:
        """Return whether the other member's host has answered nothing for too long."""
        return self._silence.lasts_too_long(time.monotonic())

    def close(self) -> None:
        """End the connection."""
        hang_up(self.connection)
        self.connection.close()
        self._queue, self._leaving = [], None
        self._payload = memoryview(b"")

    def _sleep_until(self, nbytes: int) -> None:
        """Ask the system to sleep until `nbytes` bytes have arrived, or no more fit."""
        if nbytes != self._wakes_at:
            self._wakes_at = nbytes
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def _take(self, received: int) -> None:
        of_payload = min(received, len(self._payload))
        self._payload = self._payload[of_payload:]
        if self._frame is not None and not self._payload:
            frame, self._frame = self._frame, None
            self._sink.arrived(self.member, frame)
        self._header_received += received - of_payload
        if self._header_received == HEADER_BYTES:
            self._header_received = 0
            self._frame = Frame.decode(self._header)
            self._payload = self._sink.target(self.member, self._frame)

"""How the members of a communicator connect: each with every other, by one TCP connection.

    member k                       store                       member j < k
    listens ── address, nonce ──▶ everybody's ◀── address, nonce ── listens
    connects ────────────── k, proof("joins", …) ─────────────▶ accepts
           ◀───────────────── proof("accepts", …) ────────────

Nonces are drawn anew each time and proofs made with the run's key, so nobody gets in who does not know it; where a run
has no key, who can read the store gets in, and nobody else.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from polyrhythm.communication.secret import PROOF_BYTES, nonce, prove, proves
from polyrhythm.communication.transports.collective_broken import CollectiveBroken
from polyrhythm.communication.transports.tcp.sockets import TcpSocket, listen

_JOINS, _ACCEPTS = "collectives, joins", "collectives, accepts"
_NUMBER_BYTES = 4
_PATIENCE_S = 60.0
_LOOK_EVERY_MS = 100


@dataclass(frozen=True)
class Place:
    """Where a member meets the others.

    Attributes:
        member: this one.
        address: of this host, as the others reach it.
        key: of the run; may be empty.
        check: raises what ends the meeting, such as the loss of a rank.
    """

    member: int
    address: str
    key: bytes
    check: Callable[[], None]


def connect_all(place: Place, tell_all: Callable[[str], Sequence[str]]) -> dict[int, TcpSocket]:
    """Connects this member with all others; all call it.

    Args:
        place: where this member is.
        tell_all: tells all members a word and gives theirs, in their order.

    Raises:
        CollectiveBroken: a member does not come, or its connection breaks.
    """
    try:
        with listen(place.address) as listener:
            ours = nonce()
            word = json.dumps([place.address, listener.getsockname()[1], ours.hex()])
            cards = [json.loads(each) for each in tell_all(word)]
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
        found: dict[int, TcpSocket] = {}
        while len(found) < count:
            self._await(self._listener)
            connection = self._listener.accept_one()
            with suppress(OSError):  # a stranger; the member is still to come
                other = int.from_bytes(self._receive(connection, _NUMBER_BYTES), "big")
                proof = self._receive(connection, PROOF_BYTES)
                own = self._place.member
                if (
                    own < other < len(self._cards)
                    and other not in found
                    and self._proves(proof, _JOINS, other, own)
                ):
                    connection.sendall(self._proof(_ACCEPTS, other, own))
                    found[other] = connection
                    continue
            connection.close()
        return found

    def _proof(self, purpose: str, joins: int, accepts: int) -> bytes:
        return prove(self._place.key, purpose, self._nonces[joins], self._nonces[accepts])

    def _proves(self, proof: bytes, purpose: str, joins: int, accepts: int) -> bool:
        return proves(proof, self._place.key, purpose, self._nonces[joins], self._nonces[accepts])

    def _receive(self, connection: TcpSocket, count: int) -> bytes:
        content = b""
        while len(content) < count:
            self._await(connection)
            came = connection.recv(count - len(content))
            if not came:
                raise ConnectionError("the other end was closed")
            content += came
        return content

    def _await(self, readable: socket.socket) -> None:
        ready = select.poll()
        ready.register(readable, select.POLLIN)
        while not ready.poll(_LOOK_EVERY_MS):
            self._place.check()
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"a rank did not come within {_PATIENCE_S:g} s")

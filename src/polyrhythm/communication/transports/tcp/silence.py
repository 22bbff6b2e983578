"""Whether the host at the other end of a connection is cut off in silence: nothing that this end sends is answered.

    sent ──▶ answered by the other host's kernel, be its process stopped or busy: all is well
        ──▶ sent again, and again, and no answer for as long as there is patience: cut off
    nothing to send: the kernel's own probes (keepalive) end the connection after as long

`TCP_USER_TIMEOUT` would do the former as well, but also ends connections whose other end lives and reads nothing, as a
process that is stopped; and links are opened again where they break, but collectives are not.
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

_INFO = struct.Struct("=8B13I")
"""The beginning of Linux's `struct tcp_info`, up to the time of the last acknowledgement."""

_PROBES, _UNANSWERED, _LAST_ANSWER = 3, 8 + 4, 8 + 12
_KEEPALIVES = 4


class Sign(NamedTuple):
    """What the kernel knows of a connection.

    Attributes:
        unanswered: whether something that has been sent, or a probe of a full window, has no answer yet.
        answered_s: seconds since the last answer.
    """

    unanswered: bool
    answered_s: float

    @classmethod
    def of(cls, info: bytes) -> Sign:
        """Reads a `struct tcp_info`."""
        found = _INFO.unpack_from(info)
        return cls(bool(found[_UNANSWERED] or found[_PROBES]), found[_LAST_ANSWER] / 1000)


class Silence:
    """Watches one connection.

    Args:
        connection: TCP, open.
        patience_s: how long a silence may last.
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
        """Looks; to be asked again and again while something is awaited.

        Args:
            now_s: on any clock that goes on.
        """
        if not hasattr(socket, "TCP_INFO"):
            return False
        info = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        return self.judge(Sign.of(info), now_s)

    def judge(self, sign: Sign, now_s: float) -> bool:
        """Whether the silence lasts too long, given the kernel's sign of now."""
        if not sign.unanswered:
            self._since_s = None
            return False
        if self._since_s is None or now_s - sign.answered_s > self._since_s:  # answered since
            self._since_s = now_s
        return now_s - self._since_s > self._patience_s

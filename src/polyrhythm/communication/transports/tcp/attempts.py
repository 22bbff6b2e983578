"""Attempts to reach a process whose connection broke, or that has not been reached yet."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from errno import EMFILE, ENFILE
from typing import TypeVar

from polyrhythm.communication.transports.owned_socket import hang_up
from polyrhythm.communication.transports.tcp.sockets import TcpSocket, dial

_FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 1.0
_Found = TypeVar("_Found")
_log = logging.getLogger(__name__)


class ProcessGone(Exception):
    """The process that was meant is not there any more, does without this one, or cannot be reached for too long."""


class Attempts:
    """Attempts to reach a listener.

    A refusal is final: the listener is open for as long as its process lives. So is another process at its port. Where
    nobody answers, the way may be cut: there is another attempt after a pause, each pause twice as long as the one
    before, until patience is over. A host that answers while its process says nothing (it is stopped) does not tire
    patience: a watchdog must decide.

    Args:
        address: of its host.
        port: of it.
        patience_s: gives how long there may be no way to it.
    """

    def __init__(self, address: str, port: int, patience_s: Callable[[], float]) -> None:
        self._address = address
        self._port = port
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._socket: TcpSocket | None = None
        self._over = False
        self.begin_anew()

    def begin_anew(self) -> None:
        """Has the next attempt follow at once, and counts patience from now."""
        self._began_s, self._pause_s = time.monotonic(), 0.0

    def pause_s(self) -> float:
        """Gives how long to wait before the next attempt, nothing before the first.

        Raises:
            ProcessGone: patience is over, or somebody has ended the attempts.
        """
        if self._over or time.monotonic() - self._began_s > self._patience_s():
            raise ProcessGone
        pause_s = self._pause_s
        self._pause_s = min(LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * pause_s))
        return pause_s

    def make(self, talk: Callable[[TcpSocket], _Found]) -> _Found | None:
        """Makes one attempt; gives what came of the talk, None if it broke and there may be another attempt.

        Args:
            talk: is given the connection; may raise `ProcessGone`.

        Raises:
            ProcessGone: nobody listens there any more, or `talk` says that it is somebody else.
        """
        try:
            connection = dial(self._address, self._port, self._hold)
        except ConnectionRefusedError:
            raise ProcessGone from None
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
        """Ends an attempt that is being made; called on any thread."""
        with self._lock:
            if self._socket is not None:
                hang_up(self._socket)
                self._socket = None

    def end(self) -> None:
        """Sees to it that there is no further attempt."""
        self._over = True
        self.interrupt()

    def _hold(self, connection: TcpSocket) -> None:
        with self._lock:
            self._socket = connection
            if self._over:
                raise ConnectionAbortedError

"""A middlebox between the two ends of a link: passes bytes on, and cuts connections."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress


class CuttingProxy:
    """Listens on a port of its own, and connects whoever comes with a listener.

    Args:
        port: of the listener, on loopback.
    """

    def __init__(self, port: int) -> None:
        self.port_behind = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._bytes_until_cut: int | None = None
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Resets all connections."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                _reset(end)

    def cut_after(self, count: int) -> None:
        """Resets all connections when so many more bytes have passed, in either direction."""
        with self._lock:
            self._bytes_until_cut = count

    def close(self) -> None:
        """Nobody listens any more, and all connections are cut."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            self._closed = True
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        # Both are closed when no thread uses them: else another connection could get their numbers before.
        with suppress(OSError), near, socket.create_connection(("127.0.0.1", self.port_behind)) as far:
            with self._lock:
                if self._closed:
                    return
                self._pairs.append((near, far))
                self.connections += 1
            ways = [
                threading.Thread(target=self._pass_on, args=way, daemon=True)
                for way in ((near, far), (far, near))
            ]
            for way in ways:
                way.start()
            for way in ways:
                way.join()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while some := source.recv(1 << 16):
                with self._lock:
                    left = self._bytes_until_cut
                    if left is not None:
                        self._bytes_until_cut = None if len(some) >= left else left - len(some)
                sink.sendall(some if left is None else some[:left])
                if left is not None and len(some) >= left:
                    self.cut()
                    return
            sink.shutdown(socket.SHUT_WR)


def _reset(end: socket.socket) -> None:
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RDWR)

from __future__ import annotations

import socket
import threading
import time

import pytest

from polyrhythm.communication.transports.sockets import TcpSocket, listen, receive_exactly
from polyrhythm.communication.transports.tcp.handshake import Attempts, ProcessExited

LOOPBACK = "127.0.0.1"


@pytest.fixture
def listener() -> TcpSocket:
    return listen(LOOPBACK)


def port_of(listener: TcpSocket) -> int:
    return int(listener.getsockname()[1])


def test_a_refusal_is_final_and_a_broken_talk_is_not(listener: TcpSocket) -> None:
    attempts = Attempts(LOOPBACK, port_of(listener), lambda: 60.0)

    def breaks(connection: TcpSocket) -> None:
        raise ConnectionResetError

    assert attempts.make(lambda connection: connection.getpeername()[1]) == port_of(listener)
    assert attempts.make(breaks) is None
    listener.close()
    with pytest.raises(ProcessExited):
        attempts.make(breaks)


def test_an_attempt_can_be_ended_from_another_thread(listener: TcpSocket) -> None:
    attempts = Attempts(LOOPBACK, port_of(listener), lambda: 60.0)
    waiting = threading.Event()

    def wait(connection: TcpSocket) -> None:
        waiting.set()
        if not receive_exactly(connection, 1, time.monotonic() + 20.0):
            raise ConnectionError

    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(attempts.make(wait)))
    thread.start()
    assert waiting.wait(20.0)
    attempts.end()
    thread.join(20.0)
    assert found == [None]
    with pytest.raises(ProcessExited):
        attempts.pause_s()


def test_a_stopped_process_does_not_tire_patience(listener: TcpSocket) -> None:
    patience_s = 60.0
    attempts = Attempts(LOOPBACK, port_of(listener), lambda: patience_s)

    def says_nothing(connection: TcpSocket) -> None:
        receive_exactly(connection, 1, time.monotonic())

    began_s = attempts._began_s
    assert attempts.make(says_nothing) is None
    assert attempts._began_s > began_s


def test_a_slow_speaker_has_a_limit_for_all_of_it() -> None:
    near, far = socket.socketpair()
    near.sendall(b"ab")
    assert receive_exactly(far, 2, time.monotonic() + 20.0) == b"ab"
    with pytest.raises(TimeoutError):
        receive_exactly(far, 2, time.monotonic() + 0.02)
    near.sendall(b"c")
    near.close()
    assert receive_exactly(far, 2, time.monotonic() + 20.0) == b"c"  # and nothing more
    far.close()

"""When the silence of another host lasts too long; a cable is cut for real in tests/on_processes."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

import pytest

from polyrhythm.communication.transports.between_hosts.connections import Sign, Silence, read_sign

PATIENCE_S = 60.0
ANSWERED, SENT_AGAIN = Sign(False, 0.1), Sign(True, 0.1)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        with near, far:
            yield near, far


@pytest.fixture
def silence(pair: tuple[socket.socket, socket.socket]) -> Silence:
    return Silence(pair[0], PATIENCE_S)


def test_what_is_answered_is_no_silence_however_long_nothing_was_said(silence: Silence) -> None:
    assert not silence.judge(Sign(False, 3600.0), 0.0)
    assert not silence.judge(Sign(False, 7200.0), 3600.0)


def test_it_lasts_from_the_first_look_at_which_something_was_unanswered(silence: Silence) -> None:
    looks_s = [0.0, 5.0, 30.0, 59.0, 60.0, 60.1]
    found = [silence.judge(Sign(True, 3600.0 + now_s), now_s) for now_s in looks_s]
    assert found == [False] * 5 + [True]


def test_an_answer_between_two_looks_begins_it_anew(silence: Silence) -> None:
    assert not silence.judge(Sign(True, 10.0), 0.0)
    assert not silence.judge(Sign(True, 2.0), 50.0)  # answered at 48
    assert not silence.judge(Sign(True, 60.0), 108.0)
    assert silence.judge(Sign(True, 63.0), 111.0)
    assert not silence.judge(Sign(False, 0.0), 112.0)
    assert not silence.judge(Sign(True, 1.0), 113.0)


def test_the_kernels_table_is_read_where_it_has_these_numbers() -> None:
    info = struct.pack("=8B24I", 1, *[0] * 7, *[0] * 4, 7, *[0] * 7, 4500, *[0] * 11)
    assert read_sign(info) == Sign(True, 4.5)
    assert read_sign(
        struct.pack("=8B24I", 1, 0, 0, 2, 0, 0, 0, 0, *[0] * 24)
    ).unanswered  # a full window is probed


def test_a_living_end_answers_also_when_it_reads_nothing(
    pair: tuple[socket.socket, socket.socket], silence: Silence
) -> None:
    near, _ = pair
    near.setblocking(False)
    with suppress(BlockingIOError):  # until nothing fits any more
        while near.send(bytes(1 << 16)):
            pass
    assert not silence.lasts_too_long(0.0)
    assert not silence.lasts_too_long(10 * PATIENCE_S)
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15

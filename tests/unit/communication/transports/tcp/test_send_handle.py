"""What one call hands to the system."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import pytest
import torch

from polyrhythm.communication.message import HEADER_BYTES, Kind, Message
from polyrhythm.communication.transports.sockets import RECORD_BYTES, TcpSocket, dial, listen
from polyrhythm.communication.transports.tcp.outgoing_link import SendHandle


class Noted(TcpSocket):
    """Notes what it is given, and takes no more than it is told to."""

    def __init__(self, room: int = 1 << 30) -> None:
        super().__init__(socket.AF_INET)
        self.room = room
        self.records: list[bytes] = []
        self.flags: set[int] = set()

    def sendmsg(self, parts: Iterable[bytes | memoryview], ancillary: object = (), flags: int = 0, /) -> int:  # type: ignore[override]
        self.records.append(b"".join(parts)[: self.room])
        self.flags.add(flags)
        return len(self.records[-1])


def sent(elements: int, connection: Noted) -> bytes:
    """Gives what should have been sent of a message of so many elements."""
    vector = torch.arange(elements, dtype=torch.int32)
    handle, start = SendHandle(Message(Kind.PUSH, vector), 0, 5), 0
    while start < handle.nbytes:
        start += handle.write(connection, start, socket.MSG_DONTWAIT)
    assert start == handle.nbytes == HEADER_BYTES + 4 * elements
    return vector.numpy().tobytes()


@pytest.mark.parametrize("elements", [1, (RECORD_BYTES - HEADER_BYTES) // 4, 16_000, 100_000])
def test_a_message_leaves_in_records_that_a_small_token_bucket_holds(elements: int) -> None:
    with Noted() as connection:
        content = sent(elements, connection)
    *whole, last = connection.records
    assert {len(record) for record in whole} <= {RECORD_BYTES}
    assert 0 < len(last) <= RECORD_BYTES < 30_000
    assert connection.flags == {socket.MSG_EOR | socket.MSG_DONTWAIT}
    assert b"".join(connection.records)[HEADER_BYTES:] == content


@pytest.mark.parametrize("room", [63, 64, 65, 1000])
def test_what_the_system_takes_in_pieces_is_whole(room: int) -> None:
    with Noted(room) as connection:
        content = sent(20_000, connection)
    assert b"".join(connection.records)[HEADER_BYTES:] == content


def test_inside_a_host_records_are_large() -> None:
    with listen("127.0.0.1") as listener:
        connection = dial(*listener.getsockname(), lambda connection: None)
        connection.close()
    with Noted() as noted:
        noted.record_bytes = connection.record_bytes
        content = sent(1_000_000, noted)
    assert b"".join(noted.records)[HEADER_BYTES:] == content
    *whole, last = noted.records
    assert {len(record) for record in whole} == {connection.record_bytes}
    assert 0 < len(last) <= connection.record_bytes > 10 * RECORD_BYTES

"""One connection: what leaves as one, in which order, and what is taken of what comes in pieces."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import pytest
import torch

from polyrhythm.communication.transports.between_hosts.addition import (
    HEADER_BYTES,
    Addition,
    Frame,
    Outgoing,
    Phase,
    shape_of,
)
from polyrhythm.communication.transports.between_hosts.connections import Stream
from polyrhythm.communication.transports.sockets import RECORD_BYTES, OwnedSocket, TcpSocket
from unit.communication.transports.between_hosts.meshes import pair


class Noted(TcpSocket):
    """Notes how much leaves at a time, and takes no more than it is told to."""

    def __init__(self, connected: TcpSocket) -> None:
        OwnedSocket.__init__(self, connected.family, connected.type, connected.detach())
        self.record_bytes = connected.record_bytes
        self.sent: list[tuple[int, int]] = []
        self.room = 1 << 30

    def send(self, content: bytes | memoryview, flags: int = 0, /) -> int:
        if not self.room:
            raise BlockingIOError
        self.sent.append((len(memoryview(content)), flags))
        return super().send(memoryview(content)[: self.room], flags)

    def sendmsg(self, parts: Iterable[bytes | memoryview], ancillary: object = (), flags: int = 0, /) -> int:  # type: ignore[override]
        return self.send(b"".join(parts), flags)


class Kept:
    """Keeps what arrives."""

    def __init__(self) -> None:
        self.memory: dict[int, bytearray] = {}
        self.came: list[int] = []

    def target(self, source: int, frame: Frame) -> memoryview:
        self.memory[frame.number] = bytearray(frame.nbytes)
        return memoryview(self.memory[frame.number])

    def arrived(self, source: int, frame: Frame) -> None:
        assert source == 5
        self.came.append(frame.number)


def outgoing(number: int, content: bytes) -> Outgoing:
    shape = shape_of(torch.empty(len(content), dtype=torch.uint8))
    header = Frame(number, Phase.PART, shape, 0, len(content)).encode()
    return Outgoing(0, Addition(0, 2, number, shape), header, memoryview(content))


def receive_all(stream: Stream, kept: Kept, count: int) -> None:
    stream.connection.setblocking(True)  # the other end has sent enough
    while len(kept.came) < count:
        stream.receive_on()


def test_what_leaves_leaves_in_records_that_a_small_token_bucket_holds() -> None:
    near, far = pair()
    connection, gone, kept = Noted(near), [], Kept()
    sender, receiver = Stream(connection, 1, Kept(), gone.append), Stream(far, 5, kept, gone.append)
    content = bytes(range(256)) * 400
    sender.add(outgoing(1, content))
    sender.send_on()
    assert len(gone) == 1
    assert not sender.backlog
    assert sum(length for length, _ in connection.sent) == HEADER_BYTES + len(content)
    assert max(length for length, _ in connection.sent) == RECORD_BYTES < 30_000
    assert {flags for _, flags in connection.sent} == {socket.MSG_EOR}
    receive_all(receiver, kept, 1)
    assert kept.memory[1] == content


@pytest.mark.parametrize("room", [1, 7, 33, 1000])
def test_what_the_system_takes_in_pieces_arrives_whole(room: int) -> None:
    near, far = pair()
    connection, kept = Noted(near), Kept()
    connection.room = room
    sender, receiver = (
        Stream(connection, 1, Kept(), lambda frame: None),
        Stream(far, 5, kept, lambda frame: None),
    )
    contents = {number: bytes([number]) * 90 * number for number in (1, 2, 3)}
    for number, content in contents.items():
        sender.add(outgoing(number, content))
    while sender.backlog:
        sender.send_on()
    receive_all(receiver, kept, 3)
    assert kept.memory == contents


def test_frames_of_earlier_collectives_leave_first() -> None:
    near, far = pair()
    connection, kept = Noted(near), Kept()
    sender, receiver = (
        Stream(connection, 1, Kept(), lambda frame: None),
        Stream(far, 5, kept, lambda frame: None),
    )
    connection.room = 40
    for number in (7, 9):
        sender.add(outgoing(number, bytes(100_000)))
    connection.room = 0
    sender.send_on()  # 7 has begun
    for number in (8, 3):
        sender.add(outgoing(number, bytes(100)))
    connection.room = 1 << 30
    while sender.backlog:
        sender.send_on()
    receive_all(receiver, kept, 4)
    assert kept.came == [7, 3, 8, 9]

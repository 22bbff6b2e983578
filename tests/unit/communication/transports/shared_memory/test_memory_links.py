"""Links through shared memory, both ends in this process: real sockets and real memory."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from polyrhythm.communication.message import (
    HEADER_BYTES,
    Kind,
    Message,
    encode_header,
)
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.shared_memory import links
from polyrhythm.communication.transports.shared_memory.links import (
    IN_CHUNKS,
    IN_PACKET,
    MOST_INLINE_BYTES,
    Card,
    IncomingMemoryLinks,
    OutgoingMemoryLink,
    encode_hello,
    encode_place,
    shared_file,
)
from polyrhythm.errors import PeerLost, RunError
from unit.communication.transports.heard import PATIENCE_S, Heard

SENDER, RECEIVER = Peer(3, 1), Peer(4, 0)


class Pair:
    """Both ends."""

    def __init__(self) -> None:
        self.heard = Heard()
        self.incoming = IncomingMemoryLinks("here", self.heard)

    @property
    def card(self) -> Card:
        return self.incoming.card

    def link(self) -> OutgoingMemoryLink:
        return OutgoingMemoryLink(self.card, SENDER, RECEIVER, self.heard)


@pytest.fixture
def pair() -> Iterator[Pair]:
    others = set(threading.enumerate())  # of ranks that other tests have left as a failing script would
    made = Pair()
    yield made
    made.incoming.close(PATIENCE_S)
    ours = [thread for thread in threading.enumerate() if thread not in others]
    left = [thread for thread in ours if thread.name in {"reader", "acceptor of this host"}]
    for thread in left:  # it may be in its last line
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in left)


@contextmanager
def _open(pair: Pair) -> Iterator[OutgoingMemoryLink]:
    link = pair.link()
    assert pair.heard.greeted.get(timeout=PATIENCE_S) == SENDER
    yield link
    link.close(PATIENCE_S)
    assert pair.heard.lost.empty()
    assert pair.heard.deaf.empty()


def _floats(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32)


def test_every_size_arrives_in_order(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST_SHARED_BYTES", 1 << 20)
    inline = MOST_INLINE_BYTES // 4
    sizes = [
        0,
        1,
        inline - 1,
        inline,
        inline + 1,
        100_000,
        262_144,
        262_145,
        1_000_003,
        5,
        60_000,
        0,
        300_000,
    ]
    with _open(pair) as link:
        handles = [
            link.start_send(Message(Kind.VECTOR, _floats(size), version=number), 7)
            for number, size in enumerate(sizes)
        ]
        for number, size in enumerate(sizes):
            context, source, message = pair.heard.messages.get(timeout=PATIENCE_S)
            assert (context, source, message.version) == (7, SENDER, number)
            assert message.tensor is not None
            assert torch.equal(message.tensor, _floats(size))
        for handle in handles:
            handle.wait()
            assert handle.done()


def test_who_holds_everything_still_gets_more(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST_SHARED_BYTES", 1 << 20)
    with _open(pair) as link:
        held = []
        for number in range(20):
            link.start_send(Message(Kind.PUSH, torch.full((50_000,), float(number))), 0).wait()
            held.append(pair.heard.next())
        assert all(torch.equal(m.tensor, torch.full((50_000,), float(n))) for n, m in enumerate(held))


def test_slots_come_back(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def count(size: int) -> int:
        made.append(size)
        return shared_file(size)

    monkeypatch.setattr(links, "shared_file", count)
    with _open(pair) as link:
        for number in range(100):
            link.start_send(Message(Kind.PUSH, torch.full((50_000,), float(number))), 0).wait()
            assert pair.heard.next().tensor[-1] == number
    assert len(made) <= 2


def test_what_is_held_does_not_change_and_may_be_changed(pair: Pair) -> None:
    with _open(pair) as link:
        source = _floats(30_000)
        link.start_send(Message(Kind.PUSH, source), 0).wait()
        source.fill_(-1)
        held = pair.heard.next().tensor[10:20]
        held.mul_(2)
        for _ in range(10):
            link.start_send(Message(Kind.PUSH, source), 0).wait()
            assert pair.heard.next().tensor.max() == -1
        assert held.tolist() == [2.0 * number for number in range(10, 20)]


def test_threads_keep_their_own_order(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST_SHARED_BYTES", 1 << 19)
    sizes = [0, 10, 20_000, 5_000, 100_000, 200_000]

    def send_all(tag: int) -> None:
        for version in range(30):
            size = sizes[(version + tag) % len(sizes)]
            link.start_send(Message(Kind.PUSH, torch.full((size,), tag), version=version, tag=tag), 0).wait()

    with _open(pair) as link:
        threads = [threading.Thread(target=send_all, args=(tag,)) for tag in range(4)]
        for thread in threads:
            thread.start()
        seen = dict.fromkeys(range(4), 0)
        for _ in range(120):
            message = pair.heard.next()
            assert message.version == seen[message.tag]
            seen[message.tag] += 1
            assert torch.equal(message.tensor, torch.full((len(message.tensor),), message.tag))
        for thread in threads:
            thread.join()


def test_parameters_in_training_may_be_sent(pair: Pair) -> None:
    with _open(pair) as link:
        for size in (3, 20_000):
            link.start_send(Message(Kind.PUSH, torch.ones(size, requires_grad=True)), 0).wait()
            assert pair.heard.next().tensor.sum() == size


def test_without_memory_messages_go_through_the_socket_and_one_warning_says_so(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(size: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(links, "shared_file", refuse)
    with caplog.at_level(logging.WARNING), _open(pair) as link:
        for _ in range(3):
            link.start_send(Message(Kind.PUSH, _floats(100_000)), 0).wait()
            assert torch.equal(pair.heard.next().tensor, _floats(100_000))
    assert [record.getMessage() for record in caplog.records] == [
        "no shared memory for messages to rank 4 ([Errno 28] No space left on device): "
        "they go through a socket, more slowly"
    ]


def test_a_sender_that_leaves_without_a_word_is_lost(pair: Pair) -> None:
    link = pair.link()
    link.start_send(Message(Kind.PUSH, _floats(20_000)), 0).wait()
    link._socket.shutdown(socket.SHUT_RDWR)
    assert pair.heard.lost.get(timeout=PATIENCE_S) == SENDER
    assert torch.equal(pair.heard.next().tensor, _floats(20_000))
    assert pair.heard.deaf.get(timeout=PATIENCE_S) == RECEIVER
    with pytest.raises(PeerLost, match="rank 4 is gone"):
        link.start_send(Message(Kind.PULL), 0)


def test_who_has_closed_cannot_be_reached() -> None:
    pair = Pair()
    pair.incoming.close(PATIENCE_S)
    pair.incoming._listener.close()
    with pytest.raises(PeerLost, match=r"rank 4 is gone \(noticed while opening a link to it\)"):
        pair.link()


def test_too_many_files_are_no_loss_of_a_peer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(links, "PacketSocket", refuse)
    with pytest.raises(
        RunError, match=r"no link to rank 4 can be opened \(Too many open files\): raise the limit"
    ):
        pair.link()


def test_a_link_waits_until_it_is_accepted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_BACKLOG", 0)
    narrow = Pair()
    opened: list[OutgoingMemoryLink] = []
    openers = [threading.Thread(target=lambda: opened.append(narrow.link())) for _ in range(20)]
    for opener in openers:
        opener.start()
    for opener in openers:
        opener.join()
    assert len(opened) == 20
    for link in opened:
        link.close(PATIENCE_S)
    narrow.incoming.close(PATIENCE_S)
    assert narrow.heard.lost.empty()


def _stranger(card: Card) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.settimeout(PATIENCE_S)
    stranger.connect(f"\0{card.address}")
    return stranger


@pytest.mark.parametrize("hello", [b"", b"x", b"\0" * 32, b"\0" * 300])
def test_strangers_are_turned_away_and_keep_nobody_out(pair: Pair, hello: bytes) -> None:
    with _stranger(pair.card) as stranger:
        if hello:
            stranger.send(hello)
            assert stranger.recv(1) == b""  # hung up
        with _open(pair) as link:
            link.start_send(Message(Kind.PULL, version=5), 0).wait()
            assert pair.heard.next().version == 5


def test_a_crowd_of_silent_strangers_keeps_nobody_out_and_takes_no_more_threads(pair: Pair) -> None:
    before = threading.active_count()
    crowd = [_stranger(pair.card) for _ in range(300)]
    with _open(pair) as link:
        link.start_send(Message(Kind.PULL, version=5), 0).wait()
        assert pair.heard.next().version == 5
        assert threading.active_count() - before <= links._MOST_SILENT + 3
    assert crowd[0].recv(1) == b""  # hung up on
    for stranger in crowd:
        stranger.close()


def _header(elements: int) -> bytes:
    header = bytearray(encode_header(Message(Kind.PUSH, torch.ones(1)), 0))
    header[16:24] = elements.to_bytes(8, "little")
    return bytes(header)


MALFORMED: dict[str, bytes] = {
    "short": b"too short",
    "cut": _header(1)[:-1],
    "noise": bytes(range(HEADER_BYTES)) + encode_place(IN_PACKET, 0),
    "other length": _header(5) + encode_place(IN_PACKET, 0) + b"1234",
    "no such slot": _header(1) + encode_place(3, 0),
    "no such place": _header(1) + encode_place(-9, 0),
    "absurd": _header(1 << 62) + encode_place(IN_CHUNKS, 0),
    "long": _header(1) + encode_place(IN_PACKET, 0) + b"0" * 100_000,
}


@pytest.mark.parametrize("packet", MALFORMED.values(), ids=MALFORMED)
def test_who_speaks_gibberish_is_hung_up_on(pair: Pair, packet: bytes) -> None:
    with _open(pair) as link, _stranger(pair.card) as stranger:
        stranger.send(encode_hello(pair.card.token, Peer(9, 0)))
        stranger.send(packet)
        assert pair.heard.lost.get(timeout=PATIENCE_S) == Peer(9, 0)
        assert stranger.recv(1) == b""
        link.start_send(Message(Kind.PULL, version=6), 0).wait()
        assert pair.heard.next().version == 6


def _cpu_s(wait: Callable[[float], object], seconds: float) -> float:
    before = time.process_time()
    wait(seconds)
    return time.process_time() - before


def test_fifty_idle_links_cost_no_time(pair: Pair) -> None:
    wait = threading.Event().wait
    without_s = min(
        _cpu_s(wait, 0.5) for _ in range(3)
    )  # ranks that other tests have left look at their stores
    links = [pair.link() for _ in range(50)]
    for link in links:
        link.start_send(Message(Kind.PUSH, torch.ones(20_000)), 0).wait()
        assert pair.heard.next().tensor.sum() == 20_000
    quiet = any(
        _cpu_s(wait, 0.5) < without_s + 0.05 for _ in range(10)
    )  # what came before may still be going on
    for link in links:
        link.close(PATIENCE_S)
    assert quiet

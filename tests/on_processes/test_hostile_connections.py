"""A live server, and raw bytes over TCP to its real port: it takes none of them, counts them all, and serves on."""

from __future__ import annotations

import os
import socket
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from random import Random

import pytest
import torch

from on_processes.commands import wait_for
from on_processes.live_server import LEADER, NUMBERS, RATE, SERVER, WORKER, LiveServer
from polyrhythm.communication.message import Kind, Message, encode_header
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.tcp.handshake import (
    HELLO_BYTES,
    Identity,
    ProcessExited,
    TcpCard,
    answer,
)
from polyrhythm.errors import PeerLost

CONNECTIONS, WARM_UP, FLAT_BYTES = 10_000, 2_000, 300_000


@pytest.fixture
def run() -> Iterator[LiveServer]:
    made = LiveServer(shared_memory=False)
    made.begin()
    yield made
    made.close()


def card_of(run: LiveServer, rank: int) -> TcpCard:
    return TcpCard.from_text(run.store.get(f"card/tcp/{rank}/0").decode())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def attack(card: TcpCard, random: Random, count: int) -> Counter[str]:
    """Connects so often with what is no hello, or not this peer's; gives why it should be refused."""
    wrong = TcpCard(card.address, card.port, card.name, "00" * 16)
    own = TcpCard.draw("127.0.0.1", 1)
    expected: Counter[str] = Counter()
    for _ in range(count):
        with socket.create_connection((card.address, card.port)) as connection:
            if random.random() < 0.5:
                expected["malformed"] += 1
                connection.sendall(random.randbytes(random.choice([1, HELLO_BYTES - 1, HELLO_BYTES, 1000])))
                with suppress(OSError):  # it has hung up
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1000):
                        pass
                continue
            expected["sender"] += 1
            target, peer = random.choice(
                [
                    (wrong, Peer(WORKER, 0)),
                    (card, Peer(random.choice([-1, 3, 2**62]), 0)),
                    (card, Peer(WORKER, 0)),
                ]
            )
            with pytest.raises(ProcessExited):
                answer(connection, Identity(peer, own), target, random.randbytes(16))
    return expected


def test_ten_thousand_raw_connections_change_nothing(run: LiveServer) -> None:
    push = Message(Kind.PUSH, torch.ones(NUMBERS), learning_rate=RATE)
    assert torch.equal(run.ask(WORKER, push).tensor, torch.full((NUMBERS,), -RATE))
    card, random = card_of(run, SERVER), Random(6)
    expected = attack(card, random, WARM_UP)
    files, threads = open_files(), threading.active_count()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        expected += attack(card, random, CONNECTIONS - WARM_UP)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    answered = run.ask(WORKER, push._replace(step=1, version=1))
    assert torch.equal(answered.tensor, torch.full((NUMBERS,), -2 * RATE))
    assert grown < FLAT_BYTES
    refused = run.homes[SERVER].refused
    wait_for(lambda: refused.total() == CONNECTIONS, "the last refusal")
    assert refused == expected
    wait_for(
        lambda: threading.active_count() <= threads and open_files() <= files, "the last thread and file"
    )
    assert run.end() == expected


def test_who_says_nothing_keeps_nobody_out(run: LiveServer) -> None:
    card = card_of(run, LEADER)  # nobody has linked to it from the server yet but to answer
    silent = [socket.create_connection((card.address, card.port)) for _ in range(300)]
    run.networks[WORKER].send(LEADER, Message(Kind.PULL, version=3))
    assert run.networks[LEADER].receive(WORKER)[1].version == 3
    assert silent[0].recv(1000)  # greeted,
    while silent[0].recv(1000):  # and hung up on when there were too many
        pass
    for connection in silent:
        connection.close()
    assert run.end().total() == 0


@pytest.mark.parametrize(
    ("first", "last", "value"),
    [(0, 4, 0), (4, 5, 200), (5, 6, 9), (16, 24, 255), (16, 17, NUMBERS + 1)],
    ids=["magic", "kind", "dtype", "negative", "oversized"],
)
def test_bytes_behind_an_honest_hello_end_that_link_alone(first: int, last: int, value: int) -> None:
    """Frames of ours with other bytes in them, from a process that knows the secret."""
    run = LiveServer(shared_memory=False)
    run.begin()
    server = run.homes[SERVER]
    server.most_bytes = 4 * NUMBERS
    link = run.homes[WORKER]._links.to(SERVER)
    header = bytearray(encode_header(Message(Kind.PUSH, torch.ones(NUMBERS)), 0))
    header[first:last] = bytes([value]) * (last - first)
    link._connection.sendall(header)
    wait_for(lambda: server.is_lost(WORKER), "the end of the link")
    assert server.refused.total() == 1
    with pytest.raises(PeerLost):
        run.networks[WORKER].receive(SERVER)
    run.networks[LEADER].send(SERVER, Message(Kind.LEAVE))
    run.ask(LEADER, Message(Kind.PULL, stop=True))
    run.networks[LEADER].send(SERVER, Message(Kind.LEAVE))
    run.serving.join(20.0)
    run.close()

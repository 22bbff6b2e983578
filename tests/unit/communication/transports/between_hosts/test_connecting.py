"""How members connect, over loopback; the store is a barrier of threads."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from random import Random

import pytest
import torch

from polyrhythm.communication.transports.between_hosts.collectives import HostCollectives
from polyrhythm.communication.transports.between_hosts.connections import Place, connect_all
from polyrhythm.communication.transports.member_collectives import CollectiveBroken
from polyrhythm.communication.transports.sockets import TcpSocket
from polyrhythm.errors import PeerLost
from unit.communication.transports.between_hosts.meshes import PATIENCE_S, together

LOOPBACK = "127.0.0.1"


class Store:
    """Everybody's word, given to all when it is there."""

    def __init__(self, size: int) -> None:
        self.words = [""] * size
        self.barrier = threading.Barrier(size)

    def exchange_texts(self, member: int, word: str) -> Sequence[str]:
        self.words[member] = word
        self.barrier.wait(20)
        return self.words


def never() -> None:
    """Nothing ends the meeting."""


def connect(store: Store, member: int, key: bytes = b"key") -> dict[int, TcpSocket]:
    return connect_all(Place(member, LOOPBACK, key, never), partial(store.exchange_texts, member))


@pytest.mark.parametrize("size", [2, 5])
def test_all_are_connected_with_all(size: int) -> None:
    store = Store(size)
    found = together([partial(connect, store, member) for member in range(size)])
    members = [HostCollectives(member, range(size), found[member]) for member in range(size)]
    vectors = [torch.tensor([2.0**member]) for member in range(size)]
    assert (
        together([partial(each.all_reduce, vectors[at]) for at, each in enumerate(members)]) == [None] * size
    )
    assert [float(vector) for vector in vectors] == [2.0**size - 1] * size
    for each in members:
        each.close()


def test_who_does_not_know_the_key_is_not_let_in() -> None:
    """Member 0 goes on waiting for member 1, until it is lost; the stranger is told nothing."""
    store = Store(2)
    refused = threading.Event()

    def lost_when_refused() -> None:
        if refused.is_set():
            raise PeerLost(1, "waiting for all ranks to start a collective")

    def stranger() -> dict[int, TcpSocket]:
        try:
            return connect(store, 1, b"another")
        finally:
            refused.set()

    place = Place(0, LOOPBACK, b"key", lost_when_refused)
    lost, broken = together([lambda: connect_all(place, partial(store.exchange_texts, 0)), stranger])
    assert isinstance(lost, PeerLost)
    assert isinstance(broken, CollectiveBroken)


def test_a_crowd_of_silent_strangers_keeps_no_member_waiting() -> None:
    store = Store(2)
    crowd: list[socket.socket] = []

    def crowded(word: str) -> Sequence[str]:
        words = store.exchange_texts(0, word)
        _, port, _ = json.loads(words[0])
        crowd.extend(socket.create_connection((LOOPBACK, port)) for _ in range(80))
        return words

    began_s = time.monotonic()
    first, second = together(
        [lambda: connect_all(Place(0, LOOPBACK, b"", never), crowded), partial(connect, store, 1, b"")]
    )
    assert (list(first), list(second)) == ([1], [0])
    assert time.monotonic() - began_s < PATIENCE_S
    for connection in (*crowd, first[1], second[0]):
        connection.close()


def test_a_claim_that_was_heard_is_of_no_use_at_another_meeting() -> None:
    heard: list[bytes] = []

    def listening(store: Store, word: str) -> Sequence[str]:
        """Member 1's word, of which a stranger between them tells its own address."""
        address, port, number = json.loads(word)
        relay = socket.create_server((LOOPBACK, 0))

        def carry() -> None:
            with relay, relay.accept()[0] as near, socket.create_connection((address, port)) as far:
                heard.append(near.recv(1000))
                far.sendall(heard[0])
                near.sendall(far.recv(1000))
                near.recv(1)

        threading.Thread(target=carry, daemon=True).start()
        return store.exchange_texts(0, json.dumps([address, relay.getsockname()[1], number]))

    store = Store(2)
    first, second = together(
        [
            lambda: connect_all(Place(0, LOOPBACK, b"key", never), partial(listening, store)),
            partial(connect, store, 1),
        ]
    )
    assert (list(first), list(second)) == ([1], [0])
    for connection in (first[1], second[0]):
        connection.close()

    store, refused = Store(2), threading.Event()

    def lost_when_refused() -> None:
        if refused.is_set():
            raise PeerLost(1, "waiting for all ranks to start a collective")

    def replay() -> None:
        words = store.exchange_texts(1, json.dumps([LOOPBACK, 1, bytes(32).hex()]))
        with socket.create_connection((LOOPBACK, json.loads(words[0])[1])) as stranger:
            stranger.sendall(heard[0])
            assert stranger.recv(1) == b""
        refused.set()

    place = Place(0, LOOPBACK, b"key", lost_when_refused)
    lost, replayed = together([lambda: connect_all(place, partial(store.exchange_texts, 0)), replay])
    assert isinstance(lost, PeerLost)
    assert replayed is None


def test_ten_thousand_wrong_claims_change_nothing() -> None:
    """Random bytes, claims that are cut off, and ones of members with another proof; then the member comes."""
    store, random = Store(2), Random(3)
    files = len(os.listdir("/proc/self/fd"))

    def disturbed(word: str) -> Sequence[str]:
        words = store.exchange_texts(0, word)
        _, port, _ = json.loads(words[0])
        threading.Thread(target=lambda: (claim_wrongly(port, random, 10_000), over.set())).start()
        return words

    def late() -> dict[int, TcpSocket]:
        def tell(word: str) -> Sequence[str]:
            words = store.exchange_texts(1, word)
            assert over.wait(60)
            return words

        return connect_all(Place(1, LOOPBACK, b"key", never), tell)

    over = threading.Event()
    first, second = together([lambda: connect_all(Place(0, LOOPBACK, b"key", never), disturbed), late])
    assert (list(first), list(second)) == ([1], [0])
    for connection in (first[1], second[0]):
        connection.close()
    assert len(os.listdir("/proc/self/fd")) <= files


def claim_wrongly(port: int, random: Random, count: int) -> None:
    """Connects so often to a member that waits for others, with what is no claim of one."""
    claims = [
        b"",
        b"\0",
        bytes(4),
        bytes(4) + random.randbytes(31),
        random.randbytes(36),
        random.randbytes(500),
    ]
    claims += [number.to_bytes(4, "big") + random.randbytes(32) for number in (0, 1, 2, 2**32 - 1)]
    for _ in range(count):
        with socket.create_connection((LOOPBACK, port)) as stranger, suppress(OSError):
            stranger.sendall(random.choice(claims))
            if random.random() < 0.5:
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""


def test_strangers_do_not_keep_members_out() -> None:
    store = Store(2)

    def disturbed(word: str) -> Sequence[str]:
        words = store.exchange_texts(0, word)
        _, port, _ = json.loads(words[0])
        for content in (b"", b"GET / HTTP/1.0\r\n\r\n" * 10):
            with socket.create_connection((LOOPBACK, port)) as noise:
                noise.sendall(content)
        return words

    first, second = together(
        [lambda: connect_all(Place(0, LOOPBACK, b"", never), disturbed), partial(connect, store, 1, b"")]
    )
    assert (list(first), list(second)) == ([1], [0])
    for connection in (first[1], second[0]):
        connection.close()

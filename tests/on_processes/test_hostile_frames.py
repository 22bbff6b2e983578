"""A live server, and raw bytes over its real socket: it takes none of them, counts them all, and serves on."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest
import torch

from on_processes.commands import wait_for
from on_processes.live_server import LEADER, NUMBERS, PATIENCE_S, RATE, SERVER, WORKER, LiveServer
from polyrhythm.communication.message import Kind, Message, encode_header
from polyrhythm.communication.transports.member_collectives import CollectiveBroken
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.shared_memory.links import (
    HELLO_BYTES,
    IN_PACKET,
    Card,
    encode_hello,
    encode_place,
)
from polyrhythm.communication.transports.sockets import PacketSocket
from polyrhythm.communication.transports.torch_distributed.rank import Rank
from polyrhythm.errors import PeerLost

FRAMES, WARM_UP, FLAT_BYTES = 10_000, 2_000, 200_000


@pytest.fixture
def run() -> Iterator[LiveServer]:
    made = LiveServer()
    made.begin()
    yield made
    made.close()


def frame(random: Random) -> bytes:
    """A frame of ours with other bytes in it, or bytes that are none."""
    header = bytearray(encode_header(Message(Kind.PUSH, torch.ones(NUMBERS)), 0))
    for _ in range(random.randint(1, 8)):
        header[random.randrange(len(header))] = random.randrange(256)
    place = encode_place(random.choice([IN_PACKET, -2, 0, 63, 64, 2**40]), random.getrandbits(64))
    return bytes(header) + place + random.randbytes(random.choice([0, 4 * NUMBERS, 500]))


def hello(random: Random, card: Card) -> tuple[bytes, str]:
    """What a link begins with that is not one, or not this peer's; and why it is refused."""
    token = random.randbytes(len(card.token) // 2).hex()
    return random.choice(
        [
            (random.randbytes(random.choice([1, HELLO_BYTES - 1, HELLO_BYTES + 1, 500])), "malformed"),
            (encode_hello(token, Peer(WORKER, 0)), "sender"),
            (encode_hello(card.token, Peer(random.choice([-1, 3, 2**62]), 0)), "sender"),
            (encode_hello(card.token, Peer(WORKER, random.choice([0, -1]))), "sender"),
        ]
    )


def attack(card: Card, random: Random, count: int) -> Counter[str]:
    """Opens so many links to a rank, and sends raw frames over each; gives why they should be refused."""
    expected: Counter[str] = Counter()
    for _ in range(count):
        greeting, reason = hello(random, card)
        expected[reason] += 1
        connection = PacketSocket()
        connection.connect(f"\0{card.address}")
        try:
            connection.send(greeting)
            connection.send(frame(random))
        except (BrokenPipeError, ConnectionResetError):
            continue  # it has hung up
        finally:
            connection.close()
    return expected


def test_ten_thousand_raw_frames_change_nothing(run: LiveServer) -> None:
    push = Message(Kind.PUSH, torch.ones(NUMBERS), learning_rate=RATE)
    assert torch.equal(run.ask(WORKER, push).tensor, torch.full((NUMBERS,), -RATE))
    card = Card.from_text(run.store.get(f"card/{SERVER}/0").decode())
    assert card is not None
    random = Random(5)
    expected = attack(card, random, WARM_UP)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        expected += attack(card, random, FRAMES - WARM_UP)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    # the honest worker's link is as it was, and so are the parameters
    answer = run.ask(WORKER, push._replace(step=1, version=1))
    assert torch.equal(answer.tensor, torch.full((NUMBERS,), -2 * RATE))
    assert answer.version == 2
    assert grown < FLAT_BYTES
    refused = run.homes[SERVER].refused
    wait_for(lambda: refused.total() == FRAMES, "the last refusal")
    assert refused == expected
    assert run.end() == expected


def test_a_frame_that_announces_too_much_ends_its_link_with_a_reason_and_takes_no_memory(
    run: LiveServer,
) -> None:
    told: list[str] = []
    run.homes[SERVER].notify = told.append
    run.homes[SERVER].most_bytes = 1000
    greedy = torch.empty(0).new_empty(251)
    run.networks[WORKER].send(SERVER, Message(Kind.PUSH, greedy))
    wait_for(lambda: run.homes[SERVER].is_lost(WORKER), "the end of the link")
    assert told == [
        "rank 2 refused a link of rank 1 (oversized): a payload of 1,004 bytes was announced, where 1,000 are the most "
        "in this run"
    ]
    end_without_worker(run)


@pytest.mark.parametrize("shared_memory", [False, True], ids=["tcp", "shared memory"])
def test_messages_for_communicators_that_nobody_makes_are_kept_up_to_a_bound(shared_memory: bool) -> None:
    run = LiveServer(shared_memory)
    run.begin()
    server, worker, told = run.homes[SERVER], run.homes[WORKER], []
    server.notify = told.append
    server.most_bytes = 400 * NUMBERS
    early = run.networks[WORKER].subgroup("late", range(3))
    early.send(SERVER, Message(Kind.PUSH, torch.full((NUMBERS,), 3.0)))
    wait_for(lambda: waiting(run) == 1, "the first one")
    with pytest.raises(PeerLost):
        flood(worker)
    wait_for(lambda: server.is_lost(WORKER), "the end of the link")
    assert waiting(run) == 100
    assert server.refused == {"early": 1}
    assert told == [
        "rank 2 refused a link of rank 1 (early): 101 messages with 10,504 bytes arrived for communicators "
        "that this rank "
        "has not made, where 16,384 messages and 4,000 bytes of payload may wait"
    ]
    late = run.networks[SERVER].subgroup("late", range(3))
    assert torch.equal(late.receive(WORKER)[1].tensor, torch.full((NUMBERS,), 3.0))
    answer = run.ask(LEADER, Message(Kind.PUSH, torch.ones(NUMBERS), learning_rate=RATE))
    assert torch.equal(answer.tensor, torch.full((NUMBERS,), -RATE))
    end_without_worker(run)
    run.close()


def test_what_is_for_a_communicator_that_was_given_up_before_it_was_made_does_not_wait(
    run: LiveServer,
) -> None:
    server = run.homes[SERVER]
    server.most_bytes = 4 * NUMBERS
    idle = waiting(run)
    for number in range(200):  # each alone is as much as may wait
        late = run.networks[WORKER].subgroup(f"late {number}", range(3))
        late.send(SERVER, Message(Kind.PUSH, torch.ones(NUMBERS)))
        run.homes[WORKER].start_send(SERVER, Message(Kind.REVOKE), late._context).wait()
        late.send(SERVER, Message(Kind.PUSH, torch.ones(NUMBERS)))
    push = Message(Kind.PUSH, torch.ones(NUMBERS), learning_rate=RATE)
    assert torch.equal(run.ask(WORKER, push).tensor, torch.full((NUMBERS,), -RATE))
    assert waiting(run) == idle
    with pytest.raises(CollectiveBroken):
        run.networks[SERVER].subgroup("late 7", range(3)).receive(WORKER)
    assert run.end().total() == 0


def flood(worker: Rank) -> None:
    """Sends to the server, each time for another communicator that nobody makes."""
    for context in range(100_000):
        worker.start_send(SERVER, Message(Kind.PUSH, torch.ones(NUMBERS)), context).wait()


def waiting(run: LiveServer) -> int:
    """Counts what has arrived at the server and was not taken."""
    return sum(map(len, list(run.homes[SERVER]._inbox.arrived.values())))


def end_without_worker(run: LiveServer) -> None:
    run.networks[LEADER].send(SERVER, Message(Kind.LEAVE))
    run.ask(LEADER, Message(Kind.PULL, stop=True))
    run.networks[LEADER].send(SERVER, Message(Kind.LEAVE))
    run.serving.join(PATIENCE_S)

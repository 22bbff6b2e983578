"""A live server, and raw bytes over its real socket: it takes none of them, counts them all, and serves on."""

from __future__ import annotations

import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest
import torch

from multiprocess.commands import wait_for
from polyrhythm.communication.message import Kind, Message, encode_header, pack_json, unpack_json
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.shared_memory.frames import (
    HELLO_BYTES,
    IN_PACKET,
    Card,
    encode_hello,
    encode_place,
)
from polyrhythm.communication.transports.shared_memory.sockets import PacketSocket
from polyrhythm.communication.transports.torch_distributed.rank import Rank
from polyrhythm.communication.transports.torch_distributed.rendezvous import host_store, local
from polyrhythm.communication.transports.torch_distributed.transport import (
    TorchDistributedCommunicator,
    connect,
)
from polyrhythm.roles.server import serve
from polyrhythm.roles.world import World
from polyrhythm.strategies.cast import Cast
from polyrhythm.strategies.parameter_server.parameter_server import ParameterServer
from polyrhythm.training.optimizer_plan import OptimizerPlan, Span

LEADER, WORKER, SERVER = range(3)
CAST = Cast((LEADER, WORKER), (SERVER,))
NUMBERS, RATE = 10, 0.5
FRAMES, WARM_UP, FLAT_BYTES = 10_000, 2_000, 200_000
PLAN = OptimizerPlan("SGD", (Span(0, NUMBERS, {"lr": RATE}),), RATE)
PATIENCE_S = 20.0


class Run:
    """Three ranks in one process, of which one serves on a thread of its own."""

    def __init__(self) -> None:
        self.store = host_store()
        ends = [connect(local(rank, 3, self.store.port)) for rank in range(3)]
        self.homes: list[Rank] = [home for home, _ in ends]
        self.networks: list[TorchDistributedCommunicator] = [network for _, network in ends]
        self.serving = threading.Thread(target=self._serve)
        self.serving.start()

    def _serve(self) -> None:
        serve(ParameterServer(), World(self.networks[SERVER], CAST, refused=self.homes[SERVER].refused))

    def ask(self, rank: int, message: Message) -> Message:
        """Sends something to the server; gives the answer."""
        self.networks[rank].send(SERVER, message)
        return self.networks[rank].receive(SERVER)[1]

    def begin(self) -> None:
        """Gives the server what it starts with."""
        self.networks[LEADER].send(SERVER, Message(Kind.CONFIGURE, pack_json(PLAN.to_json())))
        self.networks[LEADER].send(SERVER, Message(Kind.PARAMETERS, torch.zeros(NUMBERS)))
        for rank in CAST.workers:
            self.ask(rank, Message(Kind.PULL))

    def end(self) -> Counter[str]:
        """Ends the run as workers do; gives what the server says that it refused."""
        for rank in CAST.workers:
            self.networks[rank].send(SERVER, Message(Kind.LEAVE))
        self.ask(LEADER, Message(Kind.PULL, stop=True))
        self.networks[LEADER].send(SERVER, Message(Kind.LEAVE))
        control = World(self.networks[LEADER], CAST).control()
        while True:
            _, message = control.receive(SERVER)
            assert message.tensor is not None
            if message.kind is Kind.REPORT:
                self.serving.join(PATIENCE_S)
                return Counter(unpack_json(message.tensor)["refused"])

    def close(self) -> None:
        leaving = [threading.Thread(target=home.close) for home in self.homes]
        for thread in leaving:
            thread.start()
        for thread in leaving:
            thread.join(PATIENCE_S)


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
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


def test_ten_thousand_raw_frames_change_nothing(run: Run) -> None:
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


def test_a_frame_that_announces_too_much_ends_its_link_with_a_reason_and_takes_no_memory(run: Run) -> None:
    told: list[str] = []
    run.homes[SERVER].tell = told.append
    run.homes[SERVER].most_bytes = 1000
    greedy = torch.empty(0).new_empty(251)
    run.networks[WORKER].send(SERVER, Message(Kind.PUSH, greedy))
    wait_for(lambda: run.homes[SERVER].is_lost(WORKER), "the end of the link")
    assert told == [
        "rank 2 refused a link of rank 1 (oversized): a payload of 1,004 bytes was announced, where 1,000 are the most "
        "in this run"
    ]
    run.networks[LEADER].send(SERVER, Message(Kind.LEAVE))
    run.ask(LEADER, Message(Kind.PULL, stop=True))
    run.networks[LEADER].send(SERVER, Message(Kind.LEAVE))
    run.serving.join(PATIENCE_S)

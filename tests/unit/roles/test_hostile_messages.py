"""A live server among messages that nobody of ours sends: it takes none, counts them all, and serves on."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from math import inf, nan
from random import Random

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import (
    Kind,
    MalformedMessage,
    Message,
    decode_header,
    encode_header,
    pack_json,
    unpack_json,
)
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.events import Notice, from_json
from polyrhythm.roles.server import serve
from polyrhythm.roles.world import World
from polyrhythm.strategies.parameter_server.parameter_server import ParameterServer
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.optimizer_plan import OptimizerPlan

NUMBERS = 10
MESSAGES, WARM_UP = 10_000, 2_000
FLAT_BYTES = 32 * 1024
LEADER, WORKER, SERVER, STRANGER = range(4)
START = torch.arange(float(NUMBERS))
PLAN = OptimizerPlan("SGD", (Span(0, NUMBERS, {"lr": 0.5}),), 0.5)
CONFIGURE = Message(Kind.CONFIGURE, pack_json(PLAN.to_json()))
PARAMETERS = Message(Kind.PARAMETERS, START)
PUSH = Message(Kind.PUSH, torch.ones(NUMBERS), learning_rate=0.5)
OURS = (CONFIGURE, PARAMETERS, PUSH, Message(Kind.PULL), Message(Kind.LEAVE))
TO_OTHERS = (
    Kind.VECTOR,
    Kind.DIFFERENCE,
    Kind.REPORT,
    Kind.EVENT,
    Kind.JOIN,
    Kind.REGROUP,
    Kind.FETCH,
)
LARGE = (1, 2, 1000, 2**31, 2**62)

Hostile = tuple[int, Message, str]


def wrong_payload(random: Random) -> Tensor | None:
    lengths = [length for length in (0, 1, NUMBERS - 1, NUMBERS + 1, 1000) if length != NUMBERS]
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int64, torch.int32]
    return random.choice(
        [None, torch.ones(random.choice(lengths)), torch.ones(NUMBERS, dtype=random.choice(dtypes))]
    )


def from_a_stranger(random: Random) -> Hostile:
    return STRANGER, random.choice(OURS), "sender"


def for_others(random: Random) -> Hostile:
    return WORKER, PUSH._replace(kind=random.choice(TO_OTHERS)), "kind"


def of_another_size(random: Random) -> Hostile:
    return random.choice([LEADER, WORKER]), PUSH._replace(tensor=wrong_payload(random)), "payload"


def with_impossible_numbers(random: Random) -> Hostile:
    changes = random.choice(
        [
            {"weight": random.choice([nan, inf, -inf, -1.0])},
            {"learning_rate": random.choice([nan, inf, -inf, -0.1])},
            {"version": random.choice([*LARGE, -1, -(2**62)])},
        ]
    )
    return WORKER, PUSH._replace(**changes), "numbers"


def of_an_impossible_step(random: Random) -> Hostile:
    return WORKER, PUSH._replace(step=random.choice([*LARGE, -1, -(2**62)])), "step"


def with_baggage(random: Random) -> Hostile:
    bare = Message(random.choice([Kind.PULL, Kind.LEAVE]))
    if random.random() < 0.5:
        return WORKER, bare._replace(tensor=torch.ones(3)), "payload"
    return WORKER, bare._replace(step=random.choice(LARGE)), "numbers"


def out_of_turn(random: Random) -> Hostile:
    if random.random() < 0.2:
        return LEADER, Message(Kind.STATE, torch.ones(NUMBERS)), "order"
    source, message = random.choice([LEADER, WORKER]), random.choice([CONFIGURE, PARAMETERS])
    return source, message, "sender" if (source, message) == (WORKER, PARAMETERS) else "order"


def not_theirs_to_ask(random: Random) -> Hostile:
    asked = [
        Message(Kind.PULL, stop=True),
        Message(Kind.CHECKPOINT),
        Message(Kind.STATE, torch.ones(NUMBERS)),
    ]
    return WORKER, random.choice(asked), "sender"


def is_well_formed(message: Message) -> bool:
    if message.kind is Kind.PUSH:
        tensor = message.tensor
        fits = tensor is not None and tensor.dtype == torch.float32 and len(tensor) == NUMBERS
        numbers = 0 <= message.weight < inf and 0 <= message.learning_rate < inf
        return fits and numbers and (message.version, message.step) == (0, 0)
    bare = message.tensor is None and message[2:6] == (0, 0, 1.0, 0.0)
    return message.kind in (Kind.PULL, Kind.LEAVE) and bare


def with_other_bytes(random: Random) -> Hostile:
    """A header of ours with one to three other bytes, as the receiver reads it; malformed ones are drawn again."""
    while True:
        header = bytearray(encode_header(PUSH, 0))
        for _ in range(random.randint(1, 3)):
            header[random.randrange(len(header))] = random.randrange(256)

        def find(elements: int, dtype: torch.dtype) -> Tensor:
            if elements * dtype.itemsize != 4 * NUMBERS:
                raise MalformedMessage("another size was announced than arrived")
            return torch.ones(4 * NUMBERS, dtype=torch.uint8).view(dtype)

        try:
            context, message = decode_header(bytes(header), find)
        except MalformedMessage:
            continue
        # Other contexts and tags are others' mail, and two kinds are the transport's own.
        elsewhere = context or message.tag or message.kind in (Kind.REVOKE, Kind.CLOSE)
        if not elsewhere and not is_well_formed(message):
            return WORKER, message, ""


MUTATIONS: tuple[Callable[[Random], Hostile], ...] = (
    from_a_stranger,
    for_others,
    of_another_size,
    with_impossible_numbers,
    of_an_impossible_step,
    with_baggage,
    out_of_turn,
    not_theirs_to_ask,
    with_other_bytes,
)


def hostile(count: int) -> Iterator[Hostile]:
    random = Random(0)
    for _ in range(count):
        yield random.choice(MUTATIONS)(random)


class Attack:
    """Plays worker 0 and, in its own task, whoever else has something to say."""

    def __init__(self, ranks: list[Communicator]) -> None:
        self.ranks = ranks
        self.sent: Counter[str] = Counter()
        self.answers: list[Message] = []
        self.notices: list[str] = []
        self.report: dict[str, dict[str, int]] = {}
        self.grown_bytes = 0

    def ask(self, rank: int, *messages: Message) -> Message:
        for message in messages:
            self.ranks[rank].send(SERVER, message)
        return self.ranks[rank].receive(SERVER)[1]

    def lead(self) -> None:
        self.answers.append(self.ask(LEADER, CONFIGURE, PARAMETERS, Message(Kind.PULL)))
        tracemalloc.start()
        for number, (source, message, reason) in enumerate(hostile(MESSAGES)):
            if number == WARM_UP:
                before = tracemalloc.get_traced_memory()[0]
            self.ranks[source].send(SERVER, message)
            self.sent[reason] += 1
        self.answers.append(
            self.ask(WORKER, PUSH)
        )  # the first that is answered, so all others have been read
        self.grown_bytes = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        self.ranks[WORKER].send(SERVER, Message(Kind.LEAVE))
        self.answers.append(self.ask(LEADER, Message(Kind.LEAVE), Message(Kind.PULL, stop=True)))
        self.ranks[LEADER].send(SERVER, Message(Kind.LEAVE))
        self.hear(self.ranks[LEADER].subgroup("control", range(len(self.ranks))))

    def hear(self, control: Communicator) -> None:
        while not self.report:
            _, message = control.receive(SERVER)
            assert message.tensor is not None
            if message.kind is Kind.REPORT:
                self.report = unpack_json(message.tensor)
            elif isinstance(event := from_json(unpack_json(message.tensor)), Notice):
                self.notices.append(event.text)


def test_ten_thousand_messages_that_nobody_of_ours_sends() -> None:
    time = VirtualTime()
    cluster = SimulatedCluster(time, ConstantNetwork(time), 4)
    attack = Attack([cluster.communicator(rank) for rank in range(4)])
    world = World(attack.ranks[SERVER], RoleAssignment((LEADER, WORKER), (SERVER,)))
    strategy = ParameterServer()
    time.spawn("server", lambda: serve(strategy, world))
    time.spawn("attack", attack.lead)
    time.run()

    first, after, final = attack.answers
    assert first.tensor is not None
    assert torch.equal(first.tensor, START)
    assert after.tensor is not None
    assert torch.equal(after.tensor, START - 0.5)  # the one gradient of ours, and nothing else
    assert (after.version, after.step, after.stop) == (1, 1, False)
    assert final.tensor is not None
    assert torch.equal(final.tensor, START - 0.5)
    assert attack.report["steps"] == {"0": 0, "1": 1}
    assert attack.grown_bytes < FLAT_BYTES

    refused = Counter(attack.report["refused"])
    assert refused.total() == MESSAGES
    by_bytes = attack.sent.pop("")  # whose reason depends on which byte it was
    assert (refused - attack.sent).total() == by_bytes > 0
    assert not attack.sent - refused
    assert len(attack.notices) == len(set(attack.notices)) < 30
    assert any(
        notice.startswith(f"server 0 refused a message from rank {STRANGER} (sender): a server received")
        for notice in attack.notices
    )

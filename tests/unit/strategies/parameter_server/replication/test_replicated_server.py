"""Servers that keep each other's shards, by hand-written messages, without any network."""

from __future__ import annotations

import pytest
import torch

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage, pack_json
from polyrhythm.errors import RequestError
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.parameter_server import ParameterServer
from polyrhythm.strategies.parameter_server.replication.replicated_server import ReplicatedServer
from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.parameter_server.serving.shard import shard_session
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.server_part import ServerSetting
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.optimizer_plan import OptimizerPlan

A, B, FIRST, SECOND, THIRD = 0, 1, 2, 3, 4  # ranks: two workers, three servers
CAST = RoleAssignment((A, B), (FIRST, SECOND, THIRD))
PLAN = OptimizerPlan("SGD", (Span(0, 2, {"lr": 0.5, "momentum": 0.9}),), 0.5)
START = torch.tensor([1.0, 2.0])


def push(values: list[float], step: int = 0, version: int = 0) -> Message:
    return Message(Kind.PUSH, torch.tensor(values), version=version, step=step, learning_rate=0.5)


class Servers:
    """Three servers, whose messages to each other arrive at once."""

    def __init__(self, consistency: Consistency) -> None:
        def make(shard: int) -> ServerSession:
            return shard_session(CAST.workers, consistency)

        self.parts = {
            rank: ReplicatedServer(ServerSetting(CAST.servers.index(rank), CAST), CAST.workers, make)
            for rank in CAST.servers
        }

    def say(self, source: int, to: int, *messages: Message) -> None:
        for message in messages:
            for receiver, reply in self.parts[to].on_message(source, message):
                if receiver in self.parts:
                    self.say(to, receiver, reply)


def begun(consistency: Consistency | None = None) -> Servers:
    servers = Servers(consistency or Asynchronous())
    for rank in CAST.servers:
        servers.say(
            A,
            rank,
            Message(Kind.CONFIGURE, pack_json(PLAN.to_json())),
            Message(Kind.PARAMETERS, START.clone()),
        )
        for worker in CAST.workers:
            servers.say(worker, rank, Message(Kind.PULL))
    return servers


def values(answers: list[tuple[int, int, Message]]) -> list[tuple[int, int, list[float]]]:
    return [
        (source, to, [round(value, 6) for value in reply.tensor.tolist()])
        for source, to, reply in answers
        if reply.tensor is not None
    ]


@pytest.mark.parametrize(
    ("source", "to", "message", "reason"),
    [
        (FIRST, THIRD, Message(Kind.RELAY, step=0), Reason.SENDER),  # third keeps second's
        (A, SECOND, Message(Kind.RELAY, step=B), Reason.SENDER),
        (A, SECOND, Message(Kind.RELAY, step=A, version=2), Reason.SENDER),  # third's
        (A, SECOND, Message(Kind.RELAY, step=A, stop=True), Reason.SENDER),
        (FIRST, SECOND, Message(Kind.RELAY, step=7), Reason.SENDER),
        (SECOND, FIRST, Message(Kind.PUSH), Reason.ORDER),  # nothing is there to be acknowledged
        (THIRD, SECOND, Message(Kind.PULL, version=1), Reason.ORDER),
        (THIRD, SECOND, Message(Kind.JOIN, version=1), Reason.ORDER),  # it has not been lost
        (THIRD, SECOND, Message(Kind.STATE, START, version=1), Reason.ORDER),  # nor has second
        (FIRST, SECOND, Message(Kind.PULL), Reason.ORDER),  # of no pusher: nor is anything to be acknowledged
        (FIRST, SECOND, Message(Kind.PULL, version=2), Reason.SENDER),
        (A, FIRST, push([1.0, 2.0, 3.0]), Reason.PAYLOAD),
    ],
)
def test_what_nobody_of_ours_sends_is_refused(source: int, to: int, message: Message, reason: Reason) -> None:
    servers = begun()
    with pytest.raises(RefusedMessage) as refused:
        servers.parts[to].on_message(source, message)
    assert refused.value.reason is reason
    assert servers.parts[to].stats().version == 0


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"servers": 1}, "ask for servers=2, or for replicas=1"),
        ({"servers": 2, "aggregator": "krum(f=1)", "consistency": "synchronous"}, "use replicas=1"),
    ],
)
def test_what_cannot_be_on_two_servers_is_refused(options: dict[str, object], hint: str) -> None:
    with pytest.raises(RequestError, match=hint):
        ParameterServer(replicas=2, **options).check(5)


def test_one_server_may_be_lost_and_neighbors_not() -> None:
    faults = ParameterServer(servers=4, replicas=2).faults(5)
    assert [faults.holders_of(shard) for shard in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert [faults.shards_of(server) for server in range(4)] == [[0, 3], [1, 0], [2, 1], [3, 2]]
    assert faults.keeps_shards([0, 2])
    assert not faults.keeps_shards([3, 0])
    assert not ParameterServer(servers=4).faults(5).keeps_shards([1])

"""What the leader asks of servers, and hears."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from polyrhythm.communication.message import Kind, Message, pack_json
from polyrhythm.errors import PeerLost
from polyrhythm.events import Event, ServerJoined, ServerLost
from polyrhythm.roles.control_messages import ShardState, ShardStateRequest
from polyrhythm.roles.leading.leader import ServerReports
from polyrhythm.roles.ledger import ServerLosses
from polyrhythm.strategies.parameter_server.parameter_server import ParameterServer
from polyrhythm.strategies.role_assignment import roles_in_order
from polyrhythm.strategies.strategy import Strategy


class Run:
    """The leader of two workers and two servers (ranks 2 and 3), whose servers do what `arrives` does."""

    def __init__(self, strategy: Strategy) -> None:
        self.asked: list[tuple[int, int]] = []
        self.said: list[Event] = []
        self.arrives: list[Callable[[], None]] = []

        def send(rank: int, message: Message) -> None:
            self.asked.append((rank, ShardStateRequest.from_message(message).shard))

        network = SimpleNamespace(send=send)
        world = SimpleNamespace(roles=roles_in_order(2, 2), network=network)
        self.reports = ServerReports(world, strategy.faults(2), ServerLosses(), self.said.append, self._read)  # type: ignore[arg-type]

    def hands_in(self, rank: int, shard: int, number: float) -> None:
        state = ShardState(shard, {"shard": torch.tensor([number])}, {})
        self.arrives.append(lambda: self.reports.on_message(rank, state.message()))

    def _read(self, enough: Callable[[], bool]) -> None:
        while not enough():
            self.arrives.pop(0)()


def numbers(reports: ServerReports) -> list[float]:
    return [tensors["shard"].item() for tensors, _ in reports.ask()]


def test_states_come_in_the_order_of_shards() -> None:
    of = Run(ParameterServer(servers=2))
    of.hands_in(3, 1, 20.0)
    of.hands_in(2, 0, 10.0)
    assert numbers(of.reports) == [10.0, 20.0]
    assert of.asked == [(2, 0), (3, 1)]


def test_who_has_kept_the_shard_of_a_server_that_is_lost_meanwhile_is_asked() -> None:
    of = Run(ParameterServer(servers=2, replicas=2))
    of.hands_in(2, 0, 10.0)
    of.arrives.append(lambda: of.reports.lose(3))
    of.hands_in(2, 1, 20.0)
    assert numbers(of.reports) == [10.0, 20.0]
    assert of.asked == [(2, 0), (3, 1), (2, 1)]
    of.reports.enter(3)
    assert [type(event) for event in of.said] == [ServerLost, ServerJoined]
    assert of.reports.attendance.present == [2, 3]


def test_a_server_that_has_said_its_last_words_is_not_missed() -> None:
    of = Run(ParameterServer(servers=2))
    for rank in (2, 3):
        of.reports.on_message(rank, Message(Kind.REPORT, pack_json({"steps": rank})))
    of.reports.wait()
    of.reports.lose(3)
    assert (of.said, of.reports.reports) == ([], {2: {"steps": 2}, 3: {"steps": 3}})


def test_a_shard_that_nobody_has_kept_ends_the_run() -> None:
    with pytest.raises(PeerLost):
        Run(ParameterServer(servers=2)).reports.lose(3)

"""A worker that asks for shards which are on two servers, over a network that tells of losses by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.parameter_server.replication.replicated_server import KEPT, ReplicatedPushPull
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.worker_part import WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan

FIRST, SECOND = 2, 3


class Network:
    """Knows no server but those that are `known`, and of their successors when the clock says so.

    Args:
        known_at_s: when each server can be reached.
    """

    def __init__(self, known_at_s: dict[int, float]) -> None:
        self.known_at_s = known_at_s
        self.sent: list[tuple[int, Kind, int, float]] = []
        self.now_s = 0.0
        self.clock = SimpleNamespace(now=lambda: self.now_s, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def _look(self, rank: int) -> None:
        if self.now_s < self.known_at_s[rank]:
            raise PeerLost(rank, "sending to it", losses=2)

    def send(self, to: int, message: Message) -> None:
        self._look(to)
        self.sent.append((to, message.kind, message.version, message.weight))

    def start_send(self, to: int, message: Message) -> Any:
        self.send(to, message)
        return SimpleNamespace(wait=lambda: None, done=lambda: True)

    def poll(self, source: int, tag: int) -> None:
        self._look(source)

    def receive(self, source: int, tag: int) -> tuple[int, Message]:
        self._look(source)
        values = torch.full((2 if (source, tag) in ((FIRST, 0), (SECOND, KEPT)) else 3,), float(source))
        return source, Message(Kind.PARAMETERS, values, tag=tag)


def part_of(network: Network) -> tuple[ReplicatedPushPull, FlatParameters]:
    model = nn.Linear(4, 1)  # 5 numbers: shards of 2 and 3
    flat = FlatParameters(model)
    plan = OptimizerPlan.of(torch.optim.SGD(model.parameters(), lr=0.1), flat)
    workers = SimpleNamespace(rank=0)
    setting = WorkerSetting(network, workers, RoleAssignment((0, 1), (FIRST, SECOND)), flat, plan)  # type: ignore[arg-type]
    return ReplicatedPushPull(setting), flat


def test_who_was_away_while_both_servers_were_replaced_waits_for_word_of_who_is_there() -> None:
    network = Network({FIRST: 0.5, SECOND: 0.2})
    part, flat = part_of(network)
    part.pull()
    assert 0.2 <= network.now_s < 0.3
    assert {to for to, *_ in network.sent} == {SECOND}
    relays = [(version, weight) for _, kind, version, weight in network.sent if kind is Kind.RELAY]
    assert set(relays) == {(0, 2.0), (1, 2.0)}  # for both shards: two servers of the rank are lost
    assert flat.vector.tolist() == [3.0] * 5


def test_where_no_server_of_a_shard_is_ever_heard_of_again_it_gives_up() -> None:
    network = Network({FIRST: 1e9, SECOND: 1e9})
    with pytest.raises(PeerLost):
        part_of(network)[0].pull()
    assert 2.0 < network.now_s < 10.0


def test_a_server_that_was_lost_while_nothing_was_asked_of_it_is_asked_for_nothing_before_it_tells_so() -> (
    None
):
    network = Network({FIRST: 1e9, SECOND: 0.0})
    part, _ = part_of(network)
    part.check_losses()
    network.known_at_s[FIRST] = 0.0
    part.pull()
    assert [to for to, kind, *_ in network.sent if kind is Kind.PULL] == [SECOND, SECOND]

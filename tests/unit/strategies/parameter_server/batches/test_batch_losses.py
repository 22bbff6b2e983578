"""Sandblaster's servers go on without a worker, and let its successor in at the same batch."""

from __future__ import annotations

import torch

from polyrhythm.communication.message import Kind, Message, pack_json
from polyrhythm.strategies.parameter_server.sandblaster import Sandblaster, batch_session
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.server_part import ServerSetting
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.optimizer_plan import OptimizerPlan

WORKERS, SERVERS = (0, 1, 2), (5, 6)
PLAN = OptimizerPlan("SGD", (Span(0, 1, {"lr": 1.0}),), 1.0)
Replies = list[tuple[int, Message]]


def servers(count: int) -> dict[int, ServerSession]:
    made = {}
    for index, rank in enumerate(SERVERS[:count]):
        setting = ServerSetting(index, RoleAssignment(WORKERS, SERVERS[:count]))
        made[rank] = batch_session(setting, Sandblaster(memory=0, trials=0, tolerance=0.0))
        made[rank].on_message(0, Message(Kind.CONFIGURE, pack_json(PLAN.to_json())))
        made[rank].on_message(0, Message(Kind.PARAMETERS, torch.zeros(1)))
    return made


def told(made: dict[int, ServerSession], rank: int, replies: Replies) -> dict[int, Replies]:
    """Passes on what servers tell each other; gives what each has for workers."""
    found: dict[int, Replies] = {server: [] for server in made}
    due = [(rank, *reply) for reply in replies]
    while due:
        source, to, message = due.pop(0)
        if to in made:
            due += [(to, *reply) for reply in made[to].on_message(source, message)]
        else:
            found[source].append((to, message))
    return found


def push(value: float, step: int, weight: float = 1.0) -> Message:
    return Message(Kind.PUSH, torch.tensor([value]), 0, step, weight, 1.0)


def test_what_a_lost_worker_had_pushed_goes_along_and_its_successor_comes_after_it() -> None:
    made = servers(1)[5]
    made.on_message(1, push(6.0, 1))
    assert made.on_loss(1) == []
    assert made.on_message(1, Message(Kind.PULL)) == [(1, Message(Kind.JOIN, step=1))]
    assert made.on_message(0, push(0.0, 1)) == []
    assert made.on_message(2, push(0.0, 1)) == []  # whose batch waits for the successor's word
    replies = made.on_message(1, Message(Kind.JOIN, step=1))
    assert [(to, reply.step, reply.tensor.tolist()) for to, reply in replies if reply.tensor is not None] == [
        (0, 2, [-2.0]),
        (2, 2, [-2.0]),
        (1, 2, [-2.0]),
    ]
    assert (made.steps, made.staleness) == (dict.fromkeys(WORKERS, 2), {0: 6})


def test_a_portion_that_only_one_server_has_comes_again_and_counts_once_on_each() -> None:
    made = servers(2)
    made[5].on_message(1, push(3.0, 1))
    for server in made.values():
        server.on_loss(1)
    for rank in made:
        for worker in (0, 2):
            told(made, rank, made[rank].on_message(worker, push(0.0, 1)))
    assert [server.steps[1] for server in made.values()] == [0, 0]  # the one that had it let it go
    for server in made.values():
        assert server.on_message(1, Message(Kind.PULL)) == [(1, Message(Kind.JOIN, step=1))]
        assert server.on_message(1, Message(Kind.JOIN, step=1))[0][1].step == server.steps[1]
        assert (
            server.on_message(1, push(3.0, 1)._replace(version=1)) == []
        )  # the first takes it for an empty one
    for rank, server in made.items():
        for worker in (0, 2):
            told(made, rank, server.on_message(worker, push(0.0, 3)._replace(version=1)))
    assert [server.steps for server in made.values()] == [{0: 4, 1: 2, 2: 4}] * 2
    assert [server.staleness for server in made.values()] == [{0: 2 * 4 + 2}] * 2


def test_servers_agree_on_batches_that_only_one_of_them_had() -> None:
    """Server 5 has a whole batch of workers who are all lost; server 6 has heard so before, and has nothing."""
    made = servers(2)
    asked: Replies = []
    for worker in WORKERS:
        asked = made[5].on_message(worker, push(1.0, 1))
    assert [to for to, _ in asked] == [6]
    for worker in WORKERS:
        assert [server.on_loss(worker) for server in made.values()] == [[], []]
    [(_, first)], [(_, second)] = (made[rank].on_message(1, Message(Kind.PULL)) for rank in made)
    assert (first.step, second.step) == (1, 0)
    assert made[5].on_message(1, Message(Kind.JOIN, step=1)) == []  # it still waits for server 6
    void, answer = made[6].on_message(1, Message(Kind.JOIN, step=1))
    assert (void[0], answer[0], answer[1].step) == (5, 1, 0)
    [(to, answer)] = made[5].on_message(6, void[1])
    assert (to, answer.step, made[5].steps[1], made[5].version) == (1, 0, 0, 0)
    made[6].on_message(5, asked[0][1])
    for rank, server in made.items():
        told(made, rank, server.on_message(1, push(2.0, 1)))
    assert [(server.version, server.steps[1], server.staleness) for server in made.values()] == [
        (1, 2, {0: 2})
    ] * 2

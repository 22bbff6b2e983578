"""Who comes to a server and who goes, by hand."""

from __future__ import annotations

import pytest
import torch

from polyrhythm.communication.message import Kind, Message, RefusedMessage, pack_json
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.consistency.synchronous import Synchronous
from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.parameter_server.serving.shard import shard_session
from polyrhythm.training.optimizer_plan import OptimizerPlan, Span

PUSHERS = (3, 5)
PULL, LEAVE = Message(Kind.PULL), Message(Kind.LEAVE)
PLAN = OptimizerPlan("SGD", (Span(0, 1, {"lr": 1.0}),), 1.0)


def begun(consistency: Consistency) -> ServerSession:
    made = shard_session(PUSHERS, consistency)
    made.on_message(3, Message(Kind.CONFIGURE, pack_json(PLAN.to_json())))
    made.on_message(3, Message(Kind.PARAMETERS, torch.zeros(1)))
    return made


def answered(made: ServerSession, rank: int, message: Message = PULL) -> list[int]:
    replies = made.on_message(rank, message)
    assert all(reply.kind is Kind.PARAMETERS for _, reply in replies)
    return [to for to, _ in replies]


def test_a_successor_out_of_step_is_let_in_without_a_word() -> None:
    made = begun(Asynchronous())
    made.on_loss(5)
    made.on_loss(5)
    assert made.answer_again(5) == [(5, LEAVE)]
    assert not made.is_there(5)
    assert answered(made, 5) == [5]
    assert made.is_there(5)
    assert [to for to, reply in made.answer_again(5) if reply.kind is Kind.PARAMETERS] == [5]


def test_a_successor_in_step_is_asked_for_its_round_until_it_has_said_so() -> None:
    made = begun(Synchronous())
    assert answered(made, 5) == [5]  # no successor
    made.on_loss(5)
    asked = [(5, Message(Kind.JOIN, step=0))]
    assert made.on_message(5, PULL) == asked
    assert made.answer_again(5) == asked
    assert answered(made, 5, Message(Kind.JOIN, step=0)) == [5]
    assert answered(made, 5) == [5]


def test_without_rounds_nobody_names_one() -> None:
    with pytest.raises(RefusedMessage, match="there are none"):
        begun(Asynchronous()).on_message(5, Message(Kind.JOIN))

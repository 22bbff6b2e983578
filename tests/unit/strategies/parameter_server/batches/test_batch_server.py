"""Sandblaster's server by hand-written messages, without any network."""

import pytest
import torch

from polyrhythm.communication.message import (
    Kind,
    Message,
    RefusedMessage,
    pack_json,
)
from polyrhythm.strategies.parameter_server.sandblaster import Sandblaster, batch_session
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.server_part import ServerSetting
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.optimizer_plan import OptimizerPlan

WORKERS = (0, 2)
START = torch.tensor([1.0, 2.0])
PLAN = OptimizerPlan("SGD", (Span(0, 2, {"lr": 0.5}),), 0.5)
SEARCH = Sandblaster(memory=3, trials=0, tolerance=0.0)


def server(servers=(1,), index=0, search=SEARCH):
    made = batch_session(ServerSetting(index, RoleAssignment(WORKERS, servers)), search)
    made.on_message(0, Message(Kind.CONFIGURE, pack_json(PLAN.to_json())))
    made.on_message(0, Message(Kind.PARAMETERS, START.clone()))
    return made


def push(values, step=1, weight=2.0, version=0, rate=0.5):
    tensor = torch.tensor(values)
    return Message(Kind.PUSH, tensor, version=version, step=step, weight=weight, learning_rate=rate)


def test_what_nobody_sends_is_refused_and_changes_nothing():
    made = server((1, 3))
    made.on_message(0, push([1.0, 1.0]))
    for source, message, words in [
        (0, push([1.0, 1.0], step=3), "its batch is not over"),
        (2, push([1.0]), "a gradient of 1 numbers"),
        (2, push([1.0, 1.0], weight=-1.0), "weight -1"),
        (2, push([1.0, 1.0], version=1), "version 1"),
        (5, push([1.0, 1.0]), "which pushes nothing here"),
        (2, Message(Kind.VECTOR, torch.zeros(2)), "cannot do anything with VECTOR"),
        (2, Message(Kind.PULL, stop=True), "asked for the final parameters"),
        (3, Message(Kind.VECTOR, torch.zeros(3)), "is no square"),
    ]:
        with pytest.raises(RefusedMessage, match=words):
            made.on_message(source, message)
    assert (made.version, made.steps) == (0, {0: 0, 2: 0})

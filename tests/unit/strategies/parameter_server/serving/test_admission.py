"""Every kind of server part leaves a message that it refuses without a trace."""

from math import nan

import pytest
import torch

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage, pack_json, pack_tensors
from polyrhythm.strategies.parameter_server.downpour import Downpour
from polyrhythm.strategies.parameter_server.gaia import Gaia
from polyrhythm.strategies.parameter_server.parameter_server import ParameterServer
from polyrhythm.strategies.parameter_server.sandblaster import Sandblaster
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.strategy import ServerSetting
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.optimizer_plan import OptimizerPlan

PLAN = pack_json(OptimizerPlan("SGD", (Span(0, 3, {"lr": 0.5}),), 0.5).to_json())
GOOD = Message(Kind.PUSH, torch.ones(3), learning_rate=0.5)
BEGUN = pytest.mark.parametrize(
    "strategy", [ParameterServer(), Downpour(), Gaia(sites=1), Sandblaster()], ids=lambda one: one.name
)


def server(strategy, *, begun=True):
    made = strategy.server(ServerSetting(0, RoleAssignment((0, 1), (2,))))
    if begun:
        made.on_message(0, Message(Kind.CONFIGURE, PLAN))
        made.on_message(0, Message(Kind.PARAMETERS, torch.zeros(3)))
    return made


def refused(made, message, source=1):
    with pytest.raises(RefusedMessage) as refusal:
        made.on_message(source, message)
    return refusal.value.reason


@BEGUN
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tensor": torch.ones(4)}, Reason.PAYLOAD),
        ({"tensor": torch.ones(3, dtype=torch.float64)}, Reason.PAYLOAD),
        ({"tensor": None}, Reason.PAYLOAD),
        ({"weight": nan}, Reason.NUMBERS),
        ({"learning_rate": -1.0}, Reason.NUMBERS),
        ({"version": 1}, Reason.NUMBERS),
        ({"step": -1}, Reason.STEP),
    ],
)
def test_a_gradient_that_does_not_fit_changes_nothing(strategy, changes, reason):
    made = server(strategy)
    tensors, facts = pack_tensors(*made.state()), made.steps
    assert refused(made, GOOD._replace(stop=True, **changes)) is reason
    assert torch.equal(pack_tensors(*made.state()), tensors)
    assert made.steps == facts
    made.on_message(0, GOOD)
    made.on_message(1, GOOD)
    assert made.version >= 1
    asked = [reply for source in (0, 1) for _, reply in made.on_message(source, Message(Kind.PULL))]
    assert len(asked) == 2
    assert not any(reply.stop for reply in asked)


@BEGUN
def test_what_comes_before_its_turn_or_twice_is_refused(strategy):
    made = server(strategy, begun=False)
    assert refused(made, Message(Kind.PARAMETERS, torch.zeros(3)), source=0) is Reason.ORDER
    made.on_message(0, Message(Kind.CONFIGURE, PLAN))
    assert refused(made, Message(Kind.PARAMETERS, torch.zeros(2)), source=0) is Reason.PAYLOAD
    made.on_message(0, Message(Kind.PARAMETERS, torch.zeros(3)))
    assert refused(made, Message(Kind.CONFIGURE, PLAN), source=0) is Reason.ORDER
    assert refused(made, Message(Kind.PARAMETERS, torch.ones(3)), source=0) is Reason.ORDER

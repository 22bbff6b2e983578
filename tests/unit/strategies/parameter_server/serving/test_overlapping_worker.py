"""The worker that pushes while it computes, against a server that answers by hand."""

import pytest
import torch
from torch import nn

from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import RequestError
from polyrhythm.strategies.parameter_server.serving.push_pull import OverlappedPushPull, OverlappingWorker
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.worker_part import Step, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan


class Sent:
    """A handle."""

    def wait(self):
        """Nothing is under way."""


class Workers:
    """What is asked of the workers' communicator."""

    rank = 1


class Script:
    """A network that notes what is sent, and hands out what servers say, in order."""

    def __init__(self):
        self.sent = []
        self.said = {2: [], 3: []}

    def send(self, to, message):
        self.sent.append((to, message))

    def start_send(self, to, message):
        self.sent.append((to, message))
        return Sent()

    def receive(self, source):
        return source, self.said[source].pop(0)

    def receive_into(self, target, source):
        target.fill_(float("nan"))  # anything may be there while the message arrives
        return self.said[source].pop(0)


def made():
    """A worker of two servers with 10 numbers in buckets of 4, 2 and 4: the servers' shards have 5 each."""
    model = nn.ParameterList(torch.zeros(count) for count in (4, 2, 4))
    flat = FlatParameters(model, bucket_bytes=0)
    assert [(bucket.start, bucket.stop) for bucket in flat.buckets] == [(6, 12), (4, 6), (0, 4)]
    plan = OptimizerPlan.of(torch.optim.SGD(model.parameters(), lr=0.1), flat)
    network = Script()
    setting = WorkerSetting(network, Workers(), RoleAssignment((0, 1), (2, 3)), flat, plan)
    servers = OverlappedPushPull(setting)
    part = OverlappingWorker(setting, servers, own_updates=False, dropped_late=False, scales_parts=False)
    return network, flat, part


def header(step=1):
    return Message(Kind.PARAMETERS, torch.empty(0), version=step, step=step)


def answer(start, *numbers):
    return Message(Kind.PART, torch.tensor(numbers), version=start, step=1)


def stepped(network, flat, part, learning_rate=None):
    """Take one step; both servers have answered with headers alone."""
    flat.gradients.copy_(torch.arange(10.0))
    part.begin(Step(0, learning_rate=learning_rate))
    for bucket in range(3):
        part.bucket_ready(bucket)
    network.said[2].append(header())
    network.said[3].append(header())
    assert part.gradients_ready(Step(0), 0.1) is False
    flat.zero_gradients()
    network.said[2] += [answer(0, 10.0, 11.0, 12.0, 13.0), answer(4, 14.0)]
    network.said[3] += [answer(0, 15.0), answer(1, 16.0, 17.0, 18.0, 19.0)]


def test_answers_in_parts_change_nothing_but_what_is_awaited():
    network, flat, part = made()
    flat.vector.copy_(torch.arange(10.0))
    stepped(network, flat, part)
    assert flat.vector.tolist() == list(range(10))
    part.begin(Step(1))
    part.before_use(2)
    assert flat.vector.tolist() == [10.0, 11.0, 12.0, 13.0, *range(4, 10)]


def test_parameters_that_were_used_unannounced_are_refused():
    network, flat, part = made()
    stepped(network, flat, part)
    part.begin(Step(1))
    part.before_use(2)
    flat.gradients[7] = 1.0
    with pytest.raises(RequestError, match="used without calling its module"):
        part.bucket_ready(0)

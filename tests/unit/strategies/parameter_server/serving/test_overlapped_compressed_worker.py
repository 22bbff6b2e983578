"""The worker that compresses each bucket as it is ready, against a server that answers by hand."""

from itertools import pairwise

import torch
from torch import nn

from polyrhythm.communication.message import Kind, Message
from polyrhythm.compression.compressor import COMPRESSORS
from polyrhythm.specs import build
from polyrhythm.strategies.parameter_server.serving.compressed import OverlappedCompressedPushPull
from polyrhythm.strategies.parameter_server.serving.push_pull import OverlappingWorker
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.worker_part import Step, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan

SERVER = 2


class Sent:
    """A handle."""

    def wait(self):
        """Nothing is under way."""


class Workers:
    """What is asked of the workers' communicator."""

    rank, size = 1, 2


class Script:
    """A network that notes what is sent; its server answers every push with the parameters as they are."""

    def __init__(self, flat):
        self.sent, self.said, self.flat = [], [], flat

    def start_send(self, to, message):
        self.sent.append(message)
        if message.kind is Kind.PUSH:
            values = self.flat.vector.clone()
            cuts = [message.version for message in self.sent if message.kind is Kind.PART][::-1]
            self.said.append(Message(Kind.PARAMETERS, values[:0] if cuts else values, version=1))
            ends = [0, *cuts, len(values)] if cuts else []
            self.said += [
                Message(Kind.PART, values[start:stop], version=start) for start, stop in pairwise(ends)
            ]
        return Sent()

    def receive(self, source):
        return source, self.said.pop(0)


def made():
    """A worker of one server with two layers of 30 numbers, a bucket each."""
    model = nn.ParameterList(torch.zeros(5, 6) for _ in range(2))
    flat = FlatParameters(model, bucket_bytes=0)
    plan = OptimizerPlan.of(torch.optim.SGD(model.parameters(), lr=0.1), flat)
    network = Script(flat)
    setting = WorkerSetting(network, Workers(), RoleAssignment((0, 1), (SERVER,)), flat, plan)
    compressor = build("compressor", "top_k(density=0.1, dense_below=0)", COMPRESSORS)
    servers = OverlappedCompressedPushPull(setting, compressor)
    return (
        network,
        flat,
        OverlappingWorker(setting, servers, own_updates=False, dropped_late=False, scales_parts=False),
    )


def step(network, flat, part, number, gradient, *, known=True, weight=1.0):
    network.sent.clear()
    flat.gradients.copy_(gradient)
    part.begin(Step(number, weight, learning_rate=0.1 if known else None))
    for bucket in range(2):
        part.bucket_ready(bucket)
    part.gradients_ready(Step(number, weight, learning_rate=0.1 if known else None), 0.1)
    part.settle()
    return [(message.kind, message.version if message.kind is Kind.PART else 0) for message in network.sent]


def random(seed):
    return torch.randn(60, generator=torch.Generator().manual_seed(seed))


def test_nothing_is_kept_back_of_a_gradient_that_is_not_finite():
    network, flat, part = made()
    step(network, flat, part, 0, random(0))
    before = part.state()[0]["compression.0.residual"].clone()
    broken = random(1)
    broken[3] = float("nan")  # in the layer that is pushed last
    step(network, flat, part, 1, broken)
    assert torch.equal(part.state()[0]["compression.0.residual"], before)
    step(network, flat, part, 2, random(2))
    assert not torch.equal(part.state()[0]["compression.0.residual"], before)

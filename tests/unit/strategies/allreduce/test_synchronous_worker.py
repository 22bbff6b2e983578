"""The worker part of synchronous training, alone."""

import torch
from torch import nn

from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.strategies.allreduce.synchronous import Synchronous
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.worker_part import Step, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan


def make():
    time = VirtualTime()
    network = SimulatedCluster(time, ConstantNetwork(time), 1).communicator(0)
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor([[1.0, 2.0]])
    flat = FlatParameters(model)
    plan = OptimizerPlan.of(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), flat)
    return flat, Synchronous().worker(WorkerSetting(network, network, RoleAssignment((0,)), flat, plan))


def step(part, flat, gradient, number, weight=1.0, stop=False):
    flat.gradients.copy_(torch.tensor(gradient))
    asked = Step(number, weight, stop)
    part.begin(asked)
    return part.gradients_ready(asked, 0.5)


def test_momentum_by_hand():
    flat, part = make()
    assert step(part, flat, [2.0, 0.0], 0) is False  # buffer 2, 0
    assert step(part, flat, [1.0, 4.0], 1, stop=True) is True  # buffer 2, 4
    assert flat.vector.tolist() == [1.0 - 0.5 * (2 + 2), 2.0 - 0.5 * 4]
    assert part.staleness == {0: 2}


def test_a_step_that_everyone_sits_out_moves_nothing():
    flat, part = make()
    step(part, flat, [2.0, 0.0], 0)
    before = flat.vector.clone()
    step(part, flat, [0.0, 0.0], 1, weight=0.0)
    assert torch.equal(flat.vector, before)
    assert part.staleness == {0: 1}
    step(part, flat, [0.0, 0.0], 2)  # momentum was kept as it was: half of 2
    assert flat.vector.tolist() == [before[0].item() - 0.5, before[1].item()]


def test_state_goes_round():
    flat, part = make()
    step(part, flat, [2.0, 0.0], 0)
    tensors, facts = part.state()
    saved = {name: value.clone() for name, value in tensors.items()}
    again, other = make()
    again.vector.copy_(flat.vector)
    other.load_state((saved, facts))
    for each, vector in ((part, flat), (other, again)):
        step(each, vector, [1.0, 1.0], 1)
    assert torch.equal(flat.vector, again.vector)

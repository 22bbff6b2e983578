"""The worker part of lazy update: what it updates when, and what it refuses."""

import pytest
import torch
from torch import nn

from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.errors import RequestError
from polyrhythm.strategies.allreduce.lazy_synchronous import LazySynchronous
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.worker_part import Step, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan


def make(network, size):
    """Two parameters of a number each, a bucket each: bucket 1 is `first`, bucket 0 `second`."""
    model = nn.ParameterDict({"first": torch.tensor([1.0]), "second": torch.tensor([10.0])})
    flat = FlatParameters(model, bucket_bytes=0)
    plan = OptimizerPlan.of(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), flat)
    setting = WorkerSetting(network, network, RoleAssignment(tuple(range(size))), flat, plan)
    return flat, LazySynchronous().worker(setting)


def step(part, flat, gradients, number, weight=1.0, stop=False):
    asked = Step(number, weight, stop)
    part.begin(asked)
    flat.gradients.copy_(torch.tensor(gradients))
    told = part.gradients_ready(asked, 0.5)
    flat.zero_gradients()
    return told


def play(body, size=2):
    """Lets two workers do the same; gives what each of them gave."""
    time, found = VirtualTime(), {}
    cluster = SimulatedCluster(time, ConstantNetwork(time), size)

    def run(rank):
        flat, part = make(cluster.communicator(rank), size)
        part.start(0)
        found[rank] = body(rank, flat, part)

    for rank in range(size):
        time.spawn(f"worker {rank}", lambda rank=rank: run(rank))
    time.run()
    return [found[rank] for rank in range(size)]


@pytest.mark.parametrize("announced", [True, False])
def test_parameters_that_are_used_without_a_word_are_named(announced):
    def body(rank, flat, part):
        step(part, flat, [2.0, 4.0], 0)
        part.begin(Step(1))
        part.before_use(0)
        flat.gradients.copy_(torch.tensor([1.0, 1.0]))  # so `first` has been used after all
        part.bucket_ready(0)
        with pytest.raises(RequestError, match="first was used without calling its module"):
            part.bucket_ready(1) if announced else part.gradients_ready(Step(1), 0.5)
        return True

    assert play(body) == [True, True]


def test_an_update_in_the_middle_of_an_evaluation_can_be_followed_by_others():
    def body(rank, flat, part):
        step(part, flat, [2.0, 4.0], 0)
        with torch.inference_mode():
            part.before_use(1)
            part.before_use(0)
        step(part, flat, [0.0, 0.0], 1)
        part.settle()
        return flat.vector.tolist()

    assert play(body) == [[1.0 - 1.5, 10.0 - 3.0]] * 2

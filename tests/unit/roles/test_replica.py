"""A replica tells its strategy what happens, in order."""

from functools import partial

import pytest
import torch
from torch import nn

from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.roles import replica as module
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.world import World
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.strategies.worker_part import Step, WorkerPart
from polyrhythm.training.flat_parameters import FlatParameters


class Diary(WorkerPart):
    """Notes every call."""

    def __init__(self, setting):
        super().__init__()
        self.lines = []
        self.gradients = []
        self.flat = setting.flat

    def begin(self, step):
        self.lines.append(f"begin {step.number}")

    def before_use(self, bucket):
        self.lines.append(f"use {bucket}")

    def bucket_ready(self, bucket):
        self.lines.append(f"ready {bucket}")
        place = self.flat.buckets[bucket]
        self.gradients.append(self.flat.gradients_and_tail[place.start : place.stop].clone())

    def gradients_ready(self, step, learning_rate):
        self.lines.append(f"done {step.number} at {learning_rate}")
        return step.stop


class Diarist(Strategy):
    """A strategy of diaries."""

    def worker(self, setting):
        return Diary(setting)


class Twice(nn.Module):
    """Uses its first layer twice and its last never."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.never = (nn.Linear(3, 3, bias=False) for _ in range(3))

    def forward(self, pictures):
        return self.second(self.first(self.first(pictures)))


@pytest.fixture(autouse=True)
def _a_bucket_a_layer(monkeypatch):
    monkeypatch.setattr(module, "FlatParameters", partial(FlatParameters, bucket_bytes=36))


def make(model, pace=None, announce=True):
    time = VirtualTime()
    network = SimulatedCluster(time, ConstantNetwork(time), 2).communicator(0)
    world = World(network, RoleAssignment((0, 1)), pace)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Replica(model, optimizer, Diarist(), world, announce=announce)


def learn(made, step):
    made.begin(step)
    made.model(torch.ones(2, 3)).sum().backward()
    return made.exchange(step, 0.5)


def three_layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))


def test_a_layer_used_twice_is_ready_once_and_one_never_used_holds_those_after_it_back():
    made = make(Twice())
    for number in range(2):
        assert learn(made, Step(number)) is False
    uses = ["use 2", "use 2", "use 1"]
    # bucket 0 is the layer that is never used: nothing may be announced before it
    assert made.part.lines == ["begin 0", *uses, "done 0 at 0.5", "begin 1", *uses, "done 1 at 0.5"]


def test_several_backward_passes_in_a_step_announce_nothing():
    made = make(nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)), announce=False)
    learn(made, Step(0))
    made.announce(0)
    assert not any(line.startswith("ready") for line in made.part.lines)


def test_what_is_not_trained_becomes_worker_0s():
    time = VirtualTime()
    cluster = SimulatedCluster(time, ConstantNetwork(time), 2)
    models = [nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
    for number, model in enumerate(models):
        model[0].running_mean.fill_(number + 1.0)
        model[0].num_batches_tracked.fill_(number + 5)
        model[1].requires_grad_(False)
    trained = models[1][2].weight.detach().clone()

    def play(rank):
        world = World(cluster.communicator(rank), RoleAssignment((0, 1)))
        optimizer = torch.optim.SGD(models[rank][2].parameters(), lr=0.1)
        Replica(models[rank], optimizer, Diarist(), world, announce=True).share_untrained()

    for rank in range(2):
        time.spawn(f"worker {rank}", lambda rank=rank: play(rank))
    time.run()
    assert models[1][0].running_mean.tolist() == [1.0, 1.0]
    assert models[1][0].num_batches_tracked == 5
    assert torch.equal(models[1][1].weight, models[0][1].weight)
    assert torch.equal(models[1][2].weight, trained)


def test_a_step_of_two_passes_announces_buckets_in_the_second_with_the_gradients_of_both():
    made, reference = make(three_layers()), three_layers()
    reference(torch.ones(4, 3)).sum().backward()
    made.begin(Step(0))
    assert made.recount(2)
    made.model(torch.ones(2, 3)).sum().backward()
    assert not [line for line in made.part.lines if line.startswith("ready")]
    made.model(torch.ones(2, 3)).sum().backward()
    assert [line for line in made.part.lines if line.startswith("ready")] == ["ready 0", "ready 1"]
    for found, layer in zip(made.part.gradients, reversed(reference), strict=False):
        torch.testing.assert_close(found[: layer.weight.numel()], layer.weight.grad.flatten())
    assert not made.recount(1), "what was announced may be on its way"

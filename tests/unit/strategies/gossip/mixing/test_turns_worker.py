"""A worker that mixes in turns and has missed a common mean: what it holds, and hands on, is the newest's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.strategies.gossip.d_psgd import DPSGD
from polyrhythm.strategies.gossip.sgp import SGP
from polyrhythm.strategies.role_assignment import roles_in_order
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan

OWN, NEWEST = 1.0, 5.0


def part_of(strategy: Strategy, network: Communicator, value: float) -> tuple[WorkerPart, FlatParameters]:
    """Makes a part of one of two workers, all of whose three parameters are the value."""
    weights = nn.ParameterList([torch.zeros(3)])
    flat = FlatParameters(weights)
    plan = OptimizerPlan.of(torch.optim.SGD(weights.parameters(), lr=1.0), flat)
    everyone = network.subgroup("workers", range(2))
    part = strategy.worker(WorkerSetting(network, everyone, roles_in_order(2, 0), flat, plan))
    part.begin_at(torch.full((3,), value))
    return part, flat


@pytest.mark.parametrize("strategy", [SGP(), DPSGD()])
def test_who_has_missed_a_mean_goes_on_from_the_newest_if_that_is_lost(strategy: Strategy) -> None:
    time = VirtualTime()
    cluster = SimulatedCluster(time, ConstantNetwork(time), 2)
    found: list[list[float]] = []

    def body() -> None:
        (part, flat), (newest, vector) = (
            part_of(strategy, cluster.communicator(rank), value) for rank, value in enumerate((OWN, NEWEST))
        )
        flat.vector.copy_(vector.vector)
        assert part.take_over(newest.state(), 2, 3) == 3
        handed_on = part.model_in(part.state())
        assert handed_on is not None
        found.append(handed_on.tolist())
        part.regroup(cluster.communicator(0).subgroup("left", [0]), (0,))
        found.append(flat.vector.tolist())

    time.spawn("worker 0", body)
    time.run()
    assert found == [[NEWEST] * 3] * 2

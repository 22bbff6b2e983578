"""Keepers of workers of a ring, and what they are asked."""

from __future__ import annotations

import torch
from torch import nn

from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.strategies.gossip.pairing.keeper import Keeper, place_of
from polyrhythm.strategies.role_assignment import roles_in_order
from polyrhythm.strategies.topologies.ring import Ring
from polyrhythm.strategies.worker_part import WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan


def setting_of(worker: int, values: list[float], workers: int = 4) -> WorkerSetting:
    """Makes the setting of a worker with plain SGD."""
    weights = nn.ParameterList([torch.tensor(values)])
    flat = FlatParameters(weights)
    plan = OptimizerPlan.of(torch.optim.SGD(weights.parameters(), lr=1.0), flat)
    time = VirtualTime()
    network = SimulatedCluster(time, ConstantNetwork(time), workers).communicator(worker)
    return WorkerSetting(network, network, roles_in_order(workers, 0), flat, plan)


def keeper(worker: int, values: list[float], workers: int = 4) -> tuple[Keeper, FlatParameters]:
    """Makes the keeper of a worker of a ring that is in its third step."""
    setting = setting_of(worker, values, workers)
    made = Keeper(place_of(Ring(), range(workers), worker), setting)
    made.make_ready(3)
    return made, setting.flat


def asked(values: list[float], step: int = 0) -> Message:
    """Makes another's question."""
    return Message(Kind.VECTOR, torch.tensor(values), step=step)

"""Worker parts of gossip alone, over simulated links: no model, no data, gradients as they are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.strategies.role_assignment import roles_in_order
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.strategies.worker_part import Step, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan

NUMBERS = 6


@dataclass
class Played:
    """What a play left.

    Attributes:
        vectors: of every worker after every step, `(numbers,)` each.
        ends: of every worker, when it had left.
        parts: of every worker.
        seconds: that all of it took.
    """

    vectors: list[list[Tensor]]
    ends: list[Tensor]
    parts: list[Any] = field(default_factory=list)
    seconds: float = 0.0


def no_gradient(worker: int, step: int) -> Tensor:
    return torch.zeros(NUMBERS, dtype=torch.float64)


def at_once(worker: int, step: int) -> float:
    return 0.01


def play(
    strategy: Strategy,
    starts: Tensor,
    steps: int,
    gradient: Callable[[int, int], Tensor] = no_gradient,
    step_s: Callable[[int, int], float] = at_once,
    bytes_per_s: float = 1e9,
) -> Played:
    """Plays some steps with plain SGD of rate 1, in float64.

    Args:
        strategy: what is played.
        starts: `(workers, numbers)`, what every worker begins with, as from a checkpoint.
        steps: that all_peers takes.
        gradient: of a worker's step.
        step_s: how long it takes.
        bytes_per_s: of every link.
    """
    workers = len(starts)
    strategy.check(workers)
    time = VirtualTime()
    cluster = SimulatedCluster(time, ConstantNetwork(time, 1e-4, bytes_per_s), workers)
    played = Played([[] for _ in range(workers)], [torch.empty(0)] * workers)

    def work(rank: int) -> None:
        network = cluster.communicator(rank)
        weights = nn.ParameterList([torch.zeros(NUMBERS, dtype=torch.float64)])
        flat = FlatParameters(weights)
        plan = OptimizerPlan.of(torch.optim.SGD(weights.parameters(), lr=1.0), flat)
        everyone = network.subgroup("workers", range(workers))
        part = strategy.worker(WorkerSetting(network, everyone, roles_in_order(workers, 0), flat, plan))
        tensors, facts = part.state()
        own = next(iter(tensors))  # its parameters come first, whatever it calls them
        part.load_state((tensors | {own: starts[rank].clone()}, facts))
        played.parts.append(part)
        part.start(0)
        for number in range(steps):
            step = Step(number)
            part.begin(step)
            time.sleep(step_s(rank, number))
            flat.gradients.copy_(gradient(rank, number))
            part.gradients_ready(step, 1.0)
            flat.zero_gradients()
            played.vectors[rank].append(flat.vector.clone())
        part.settle()
        part.end()
        played.ends[rank] = flat.vector.clone()
        if rank == 0:
            part.release()

    for rank in range(workers):
        time.spawn(f"worker {rank}", lambda rank=rank: work(rank))  # type: ignore[misc]
    time.run()
    played.seconds = time.now()
    return played


def whole_numbers(workers: int, seed: int = 1) -> Tensor:
    """Draws what workers begin with: multiples of 1024, whose halves stay exact for ten steps."""
    generator = torch.Generator().manual_seed(seed)
    return 1024.0 * torch.randint(-50, 50, (workers, NUMBERS), generator=generator).double()

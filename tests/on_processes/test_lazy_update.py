"""Lazy update over real processes, with hooks in forward and backward passes: the bits of the eager mode."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from conformance.jobs import strategy
from conformance.rank_processes import RankProcesses, Seat
from polyrhythm.communication.transports.torch_distributed.communicator import TorchDistributedCommunicator
from polyrhythm.roles import replica as replica_module
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.world import World
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.worker_part import Step
from polyrhythm.training.flat_parameters import FlatParameters

STEPS = 8


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def train(spec: str, world: World, announce: bool) -> list[bytes]:
    """Takes ragged steps, each on a batch of this worker's own; gives what a saved model would hold now and then."""
    model, rank = network(), world.network.rank
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    replica = Replica(model, optimizer, strategy(spec), world, announce=announce)
    replica.part.start(0)
    kept = []
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(100 * rank + number)
        images = torch.randn(5, 6, generator=generator)
        step = Step(number, 0.6 if rank == 1 and number == 5 else 1.0)
        replica.begin(step)
        model(images).square().mean().backward()
        replica.exchange(step, 0.01)
        if number in (2, STEPS - 1):
            values = model.state_dict().values()
            kept.append(torch.cat([value.reshape(-1) for value in values]).numpy().tobytes())
    replica.part.end()
    world.network.barrier()  # who lets go of its replica closes connections that others may still read from
    return kept


def compare(seat: Seat, spec: str, announce: bool) -> None:
    torch.set_num_threads(1)
    replica_module.FlatParameters = partial(FlatParameters, bucket_bytes=256)  # type: ignore[misc, assignment]
    home, network = seat.connect()
    roles = RoleAssignment(tuple(range(seat.size)))
    worlds = [World(_named(network, place), roles) for place in range(2)]
    found = [train(each, world, announce) for each, world in zip(("synchronous", spec), worlds, strict=True)]
    seat.tell(found[0] == found[1] and len(set(found[0])) == 2)
    home.close()


def _named(network: TorchDistributedCommunicator, place: int) -> TorchDistributedCommunicator:
    return network.subgroup(f"run {place}", range(network.size))


@pytest.mark.parametrize(
    ("workers", "shared_memory", "spec", "announce"),
    [
        (3, True, "lazy_synchronous(piece_bytes=400)", True),
        (2, False, "lazy_synchronous(piece_bytes=400)", False),
    ],
    ids=["in_one_host", "over_gloo_in_an_own_loop"],
)
def test_it_has_the_bits_of_the_eager_mode(
    workers: int, shared_memory: bool, spec: str, announce: bool
) -> None:
    with RankProcesses(compare, workers, spec, announce, shared_memory=shared_memory) as ranks:
        assert [ranks.hear(rank) for rank in range(workers)] == [True] * workers
        ranks.wait_for_end(range(workers))

"""Training with a hybrid pass and its update is training with one large batch, whatever the scheme."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from polyrhythm.communication.collectives.direct import Direct
from polyrhythm.communication.collectives.library import Library
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.errors import RequestError
from polyrhythm.partition.cut import cut
from polyrhythm.partition.ownership import Ownership, division
from polyrhythm.strategies.allreduce.hybrid import HybridUpdate
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.optimizers.lars import LARS
from tolerances import REORDERED
from unit.partition.hybrid_workers import IMAGE, batch, network

RATE, STEPS = 0.1, 4
SIZES = [4, 4, 3]


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=RATE)


def trained(scheme, sizes, optimizer=momentum, collective=None):
    """Gives every worker's vector, the pieces of the whole one that are in it, and what it was told of each step."""
    time = VirtualTime()
    cluster = SimulatedCluster(time, ConstantNetwork(time, 1e-3, 1e6), len(sizes))
    found = {}

    def play(rank):
        model = network()
        flat = FlatParameters(model, elsewhere=len(sizes) > 1)
        group, plan = cluster.communicator(rank), OptimizerPlan.of(optimizer(model.parameters()), flat)
        image = torch.zeros(1, *IMAGE, dtype=torch.float64)
        divided = division(model, flat, image, "copied", len(sizes), rank)
        passes, own, ownership = divided.passes(group, scheme), divided.own, divided.ownership
        own.allocate_gradients()
        updates = HybridUpdate(own, ownership, plan, group, collective or Library())
        told = []
        for step in range(STEPS):
            images, labels = batch(rank + 10 * step, sizes[rank])
            weight = 1.0 if len(sizes) == 1 else sizes[rank] / max(sizes)
            passes.run(
                images,
                lambda logits, place, labels=labels: functional.cross_entropy(logits, labels[place]),
                weight,
            )
            told.append(updates.update(weight, RATE, stop=rank == 1 and step == 2))
        found[rank] = (own.flat.vector, own.pieces[rank] if len(sizes) > 1 else [slice(0, flat.size)], told)

    for rank in range(len(sizes)):
        time.spawn(f"worker {rank}", lambda rank=rank: play(rank))
    time.run()
    return [found[rank] for rank in range(len(sizes))]


def pieces_of(worker):
    """Gives the values of each piece of the whole vector that a worker has."""
    vector, pieces, _ = worker
    return zip(pieces, vector.split([piece.stop - piece.start for piece in pieces]), strict=True)


def serially(sizes, optimizer=momentum):
    model = network()
    rule = optimizer(model.parameters())
    for step in range(STEPS):
        batches = [batch(worker + 10 * step, size) for worker, size in enumerate(sizes)]
        images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        rule.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        rule.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize("optimizer", [momentum, adam])
@pytest.mark.parametrize("scheme", ["a", "b", "c"])
def test_workers_together_are_serial_training(scheme, optimizer):
    expected = serially(SIZES, optimizer)
    seen = torch.zeros(len(expected), dtype=torch.long)
    for worker in trained(scheme, SIZES, optimizer):
        for piece, values in pieces_of(worker):
            torch.testing.assert_close(values, expected[piece], **REORDERED)
            seen[piece] += 1
    trunk = 3 * 2 * 9 + 3
    assert (seen[:trunk] == 3).all()
    assert (seen[trunk:] == 1).all()


@pytest.mark.parametrize("optimizer", [momentum, adam])
def test_one_worker_is_serial_training_bit_for_bit(optimizer):
    ((whole, _, told),) = trained("c", [5], optimizer)
    assert torch.equal(whole, serially([5], optimizer))
    assert told == [(1.0, False)] * STEPS


def test_a_worker_has_and_changes_the_trunk_and_its_own_slices():
    start = FlatParameters(network()).vector
    model = network()
    parts = cut(model, torch.zeros(1, *IMAGE, dtype=torch.float64))
    flat = FlatParameters(model)
    ownership = Ownership.of(flat, parts, 3)
    (trunk,) = ownership.shared
    assert trunk == slice(0, 3 * 2 * 9 + 3)
    owned = sorted((piece.start, piece.stop) for worker in range(3) for piece in ownership.pieces(worker))
    assert owned[0][0] == trunk.stop
    assert owned[-1][1] == flat.size
    assert all(before[1] == after[0] for before, after in pairwise(owned))
    for rank, worker in enumerate(trained("a", SIZES)):
        pieces = [trunk, *ownership.pieces(rank)]
        assert len(worker[0]) == sum(piece.stop - piece.start for piece in pieces)
        changed = torch.cat([values != start[piece] for piece, values in pieces_of(worker)])
        assert changed.float().mean() > 0.8  # rectifiers leave some at rest


def test_a_wish_to_stop_reaches_all_at_the_same_step():
    for _, _, told in trained("b", SIZES, collective=Direct()):
        assert [stop for _, stop in told] == [False, False, True, False]
        assert [weight for weight, _ in told] == [2.75] * STEPS


def test_an_optimizer_of_whole_layers_is_refused():
    with pytest.raises(
        RequestError, match="LARSOptimizer looks at whole layers, and hybrid parallelism cuts them"
    ):
        trained("a", [2, 2], lambda parameters: LARS(lr=0.1).create(parameters))

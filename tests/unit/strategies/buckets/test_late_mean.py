"""The weighted mean of a group's gradients, waited for bucket by bucket, over simulated links."""

import pytest
import torch
from torch import nn

from polyrhythm.communication.collectives.library import Library
from polyrhythm.communication.collectives.ring import Ring
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.strategies.allreduce.lazy_synchronous import LateMean
from polyrhythm.strategies.worker_part import Step
from polyrhythm.training.flat_parameters import FlatParameters

NUMBERS = (6, 40, 6)  # of the model's parameters, in its order: the fat one is cut


def exchange(weights, stops, *, piece_bytes, collective=None, announced=3, steps=1):
    """Averages integers; gives what every member took of every bucket, and what it was told of the step."""
    time = VirtualTime()
    cluster = SimulatedCluster(time, ConstantNetwork(time), len(weights))
    found = []

    def play(rank):
        flat = FlatParameters(nn.ParameterList(torch.zeros(count) for count in NUMBERS), bucket_bytes=0)
        mean = LateMean(cluster.communicator(rank), flat, collective or Library(), piece_bytes)
        mean.prepare()
        for number in range(steps):
            step = Step(number, weights[rank], stops[rank])
            mean.begin(step)
            flat.gradients.copy_(gradient(rank, number))
            for bucket in range(announced if weights[rank] else 0):
                mean.start(bucket)
                time.sleep(0.001 * rank)
            told = mean.finish(step)
            flat.gradients.fill_(float("nan"))  # what has been started must not be looked at any more
            taken = torch.cat([mean.take(bucket).clone() for bucket in (2, 1, 0)])
        found.append((taken, told))

    for rank in range(len(weights)):
        time.spawn(f"member {rank}", lambda rank=rank: play(rank))
    time.run()
    return found


def gradient(rank, step=0):
    return torch.arange(sum(NUMBERS), dtype=torch.float32) * (rank + 1) + 8.0 * step


@pytest.mark.parametrize("announced", [0, 2, 3])
@pytest.mark.parametrize("piece_bytes", [0, 40, 4 << 20])
@pytest.mark.parametrize("collective", [Library(), Ring()], ids=str)
def test_the_mean_is_weighted_with_samples(announced, piece_bytes, collective):
    weights, steps = [1.0, 0.5, 0.0, 0.5], 3
    found = exchange(
        weights, [False] * 4, piece_bytes=piece_bytes, collective=collective, announced=announced, steps=steps
    )
    parts = [weight * gradient(rank, steps - 1) for rank, weight in enumerate(weights)]
    expected = torch.stack(parts).sum(0) / 2.0
    for taken, told in found:
        assert torch.equal(taken, expected)
        assert told == (2.0, False)


@pytest.mark.parametrize("wishing", [[0], [2], [0, 1, 2]])
def test_a_wish_to_stop_reaches_all_at_the_same_step(wishing):
    stops = [rank in wishing for rank in range(3)]
    assert [told for _, told in exchange([1.0] * 3, stops, piece_bytes=40)] == [(3.0, True)] * 3


def test_one_member_keeps_its_gradients_and_its_wish():
    time = VirtualTime()
    flat = FlatParameters(nn.ParameterList(torch.zeros(count) for count in NUMBERS), bucket_bytes=0)
    network = SimulatedCluster(time, ConstantNetwork(time), 1).communicator(0)
    mean = LateMean(network, flat, Library(), 40)
    mean.prepare()
    mean.begin(Step(0, 0.3, True))
    flat.gradients.copy_(gradient(0))
    mean.start(0)
    assert mean.finish(Step(0, 0.3, True)) == (0.3, True)
    assert torch.equal(torch.cat([mean.take(bucket) for bucket in (2, 1, 0)]), gradient(0))


def test_without_any_weight_there_is_no_division():
    for taken, told in exchange([0.0, 0.0], [False] * 2, piece_bytes=0):
        assert told == (0.0, False)
        assert bool(taken.isfinite().all())

"""Gradients that travel as numbers of two bytes, over simulated links."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polyrhythm.communication.collectives.library import Library
from polyrhythm.communication.collectives.rabenseifner import Rabenseifner
from polyrhythm.communication.collectives.ring import Ring
from polyrhythm.communication.message import HEADER_BYTES
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.errors import RequestError
from polyrhythm.strategies.gradient_mean import gradient_mean
from polyrhythm.strategies.worker_part import Step
from polyrhythm.training.flat_parameters import TAIL, FlatParameters

NUMBERS = 60
ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8}
NARROW = list(ROUNDING)


def exchange(transfer, gradients, weights=None, wishing=(), collective=None):
    """Averages the members' gradients once; gives what all found, their gradients, and the bytes that member 0 sent."""
    time = VirtualTime()
    cluster = SimulatedCluster(time, ConstantNetwork(time), len(gradients))
    weights = weights or [1.0] * len(gradients)
    found, held, sent = {}, {}, {}

    def play(rank):
        flat = FlatParameters(nn.ParameterList(torch.zeros(20) for _ in range(3)), bucket_bytes=80)
        flat.gradients.copy_(gradients[rank])
        communicator = cluster.communicator(rank)
        mean = gradient_mean(communicator, flat, collective or Library(), transfer)
        mean.prepare()
        before = communicator.traffic.bytes_sent
        step = Step(7, weights[rank], rank in wishing)
        mean.begin(step)
        for bucket in range(rank % 3):
            mean.start(bucket)
        found[rank] = mean.finish(step)
        held[rank], sent[rank] = flat.gradients.clone(), communicator.traffic.bytes_sent - before

    for rank in range(len(gradients)):
        time.spawn(f"member {rank}", lambda rank=rank: play(rank))
    time.run()
    assert all(torch.equal(held[rank], held[0]) for rank in held)
    assert all(found[rank] == found[0] for rank in found)
    return found[0], held[0], sent[0]


def random(seed, scale=1.0):
    return torch.randn(NUMBERS, generator=torch.Generator().manual_seed(seed)) * scale


def dyadic(seed):
    return torch.randint(-4, 5, (NUMBERS,), generator=torch.Generator().manual_seed(seed)).float() / 8


@pytest.mark.parametrize("collective", [Library(), Ring(), Rabenseifner()], ids=str)
@pytest.mark.parametrize("transfer", NARROW)
def test_numbers_that_the_type_holds_are_exact(transfer, collective):
    gradients = [dyadic(rank) for rank in range(4)]
    _, found, _ = exchange(transfer, gradients, collective=collective)
    assert torch.equal(found, torch.stack(gradients).mean(0))


@pytest.mark.parametrize("transfer", NARROW)
def test_one_cast_is_off_by_no_more_than_the_rounding_of_its_type(transfer):
    gradient = random(0)
    _, found, _ = exchange(transfer, [gradient, torch.zeros(NUMBERS)])
    error = (found - gradient / 2).abs() / (gradient / 2).abs()
    assert 0 < float(error.max()) <= ROUNDING[transfer]


@pytest.mark.parametrize("transfer", NARROW)
def test_gradients_are_weighted_with_samples_and_weights_are_exact(transfer):
    weights = [1.0, 0.3, 0.0, 7 / 512]
    gradients = [random(rank) for rank in range(4)]
    (weight, stop), found, _ = exchange(transfer, gradients, weights)
    assert weight == pytest.approx(sum(weights), abs=2**-31)
    assert not stop
    exact = sum(share * gradient for share, gradient in zip(weights, gradients, strict=True)) / sum(weights)
    bound = (
        8 * ROUNDING[transfer] * sum(gradient.abs() for gradient in gradients)
    )  # casts, and three additions
    assert bool(((found - exact).abs() <= bound).all())


@pytest.mark.parametrize("transfer", NARROW)
def test_wishes_are_heard_and_without_any_weight_there_is_no_mean(transfer):
    assert exchange(transfer, [random(0), random(1)], wishing=[1])[0] == (2.0, True)
    empty = torch.zeros(NUMBERS)
    (weight, _), found, _ = exchange(transfer, [empty, empty], weights=[0.0, 0.0])
    assert weight == 0
    assert torch.equal(found, empty)


def test_gradients_are_divided_before_they_are_added_up():
    """The sum of all four is 240,000, and the largest number of float16 is 65,504."""
    large = torch.full((NUMBERS,), 60_000.0)
    assert torch.equal(exchange("float16", [large] * 4)[1], large)


def test_a_gradient_beyond_float16_is_named_on_all_members_and_bfloat16_bears_it():
    huge = torch.full((NUMBERS,), 2.0**19)
    with pytest.raises(
        RequestError, match=r"^at step 7 a gradient is beyond the range of float16.*transfer=bfloat16"
    ):
        exchange("float16", [huge] * 4)
    assert torch.equal(exchange("bfloat16", [huge] * 4)[1], huge)


@pytest.mark.parametrize("transfer", NARROW)
def test_bytes_halve_but_for_one_small_message_of_whole_numbers(transfer):
    gradients, messages = [random(0), random(1)], 1  # of one member of two, for each sum
    full = exchange("full", gradients)[2] - 3 * messages * HEADER_BYTES - TAIL * 4
    half = exchange(transfer, gradients)[2] - 4 * messages * HEADER_BYTES - TAIL * 8
    assert (full, half) == (NUMBERS * 4, NUMBERS * 2)

"""Hybrid parallelism: whatever the scheme and the workers, the gradients of one large batch."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.cost import hybrid
from polyrhythm.partition.cut import cut
from polyrhythm.partition.hybrid_pass import HybridPass, neurons
from unit.partition.hybrid_workers import CLASSES, IMAGE, batch, gradients, network, passes

SCHEMES = ["a", "b", "c"]
FEATURES, NUMBER_BYTES = 48, 8


def test_a_trunk_without_parameters_gets_no_gradients_back():
    def perceptron():
        torch.manual_seed(5)
        return nn.Sequential(nn.Flatten(), nn.Linear(72, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()

    found = passes("a", [4, 4], make=perceptron)
    expected = hybrid.examples(2, 4, 72) + hybrid.between_layers(2, 4, (6, CLASSES), 0)
    assert found[0].received_bytes == NUMBER_BYTES * expected


def test_frozen_layers_are_left_alone():
    def frozen():
        model = network()
        model[4].requires_grad_(False)
        model[7].bias.requires_grad_(False)
        return model

    whole = gradients(passes("c", [4, 4]), [4, 4])
    for each in passes("c", [4, 4], make=frozen):
        found = {name for name, parameter in each.model.named_parameters() if parameter.grad is not None}
        assert found == {"0.weight", "0.bias", "7.weight", "9.weight", "9.bias"}
        place = each.places[1]
        grown = each.model.get_parameter("7.weight").grad[place] / 2
        torch.testing.assert_close(grown, whole["7.weight"][place], rtol=1e-12, atol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_random_numbers_do_not_depend_on_who_comes_first(scheme):
    def make():
        return network(0.5)

    early, late = (
        gradients(passes(scheme, [4, 4, 4], make=make, lag_s=lag_s), [4, 4, 4]) for lag_s in (0.0, 1.0)
    )
    assert early.keys() == late.keys()
    assert all(torch.equal(early[name], late[name]) for name in early)


def test_passes_follow_each_other_without_mixing():
    time = VirtualTime()
    cluster = SimulatedCluster(time, ConstantNetwork(time, 1e-3, 1e6), 2)
    losses = {0: [], 1: []}

    def play(rank):
        model = network()
        parts = cut(model, torch.zeros(1, *IMAGE, dtype=torch.float64))
        steps = HybridPass(parts, cluster.communicator(rank), "b")
        for step in range(3):
            images, labels = batch(rank + 2 * step, 4)
            losses[rank].append(
                steps.run(
                    images, lambda logits, place, all=labels: functional.cross_entropy(logits, all[place])
                )
            )
            time.sleep(0.5 * rank)

    for rank in range(2):
        time.spawn(f"worker {rank}", lambda rank=rank: play(rank))
    time.run()
    for rank, found in losses.items():
        for step, value in enumerate(found):
            images, labels = batch(rank + 2 * step, 4)
            expected = functional.cross_entropy(network()(images), labels).item()
            assert value == pytest.approx(expected, rel=1e-12)


def test_the_next_examples_travel_while_the_head_waits_for_its_own():
    """With a slow first message, scheme b is faster than its rounds one after the other would be."""
    time = VirtualTime()
    cluster = SimulatedCluster(time, ConstantNetwork(time, 1.0, 1e12), 2)
    ends = []

    def play(rank):
        torch.manual_seed(1)
        parts = cut(nn.Sequential(nn.Flatten(), nn.Linear(72, CLASSES)).double(), batch(0, 1)[0])
        images, labels = batch(rank, 2)
        HybridPass(parts, cluster.communicator(rank), "b").run(
            images, lambda logits, place: functional.cross_entropy(logits, labels[place])
        )
        ends.append(time.now())

    for rank in range(2):
        time.spawn(f"worker {rank}", lambda rank=rank: play(rank))
    time.run()
    # Worker 1 has examples at 1 s, worker 0 their logits at 2 s, worker 1 the gradients of these at 3 s. Of the second
    # round the examples are there at 1 s, so worker 0's logits at 3 s and their gradients at 4 s, instead of at 6 s.
    assert max(ends) == pytest.approx(4.0, abs=1e-3)


def test_neighboring_slices_cover_all_neurons():
    for count, workers in [(10, 3), (2, 5), (6144, 6)]:
        slices = neurons(count, workers)
        assert slices[0].start == 0
        assert slices[-1].stop == count
        assert all(first.stop == second.start for first, second in pairwise(slices))
        lengths = [place.stop - place.start for place in slices]
        assert max(lengths) - min(lengths) <= 1

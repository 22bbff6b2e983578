"""An optimizer slice by slice is the optimizer of the whole, to the bit, and is saved as it."""

import pytest
import torch
from torch import nn

from polyrhythm.errors import RequestError
from polyrhythm.training.flat_optimizer import ELEMENTWISE
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan, SlicedOptimizer

NUMBERS = 23
CUTS = {
    "three": [slice(15, 23), slice(4, 15), slice(0, 4)],
    "one": [slice(0, 23)],
    "two": [slice(0, 9), slice(9, 23)],
}
OPTIONS = {"SGD": {"momentum": 0.9, "weight_decay": 0.01}, "RMSprop": {"momentum": 0.5}}


def plan_of(kind):
    """Two groups of options, cut at other places than any vector; two numbers between them are not trained."""
    model = nn.ParameterList([torch.arange(10.0), torch.ones(2), torch.arange(11.0)])
    flat = FlatParameters(model, bucket_bytes=0)
    options = OPTIONS.get(kind, {})
    groups = [{"params": [model[0]], "lr": 0.01}, {"params": [model[2]], "lr": 0.02}]
    return OptimizerPlan.of(ELEMENTWISE[kind](groups, **options), flat), flat.vector


def gradient(step):
    return torch.randn(NUMBERS, generator=torch.Generator().manual_seed(step))


def train(optimizer, vector, steps, cut):
    for step in steps:
        for number, place in enumerate(CUTS[cut]):
            optimizer.step(number, gradient(step)[place], 0.01 * (step + 1))
    return vector


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE))
@pytest.mark.parametrize("cut", CUTS)
def test_it_is_the_optimizer_of_the_whole(kind, cut):
    plan, expected = plan_of(kind)
    vector = expected.clone()
    whole, sliced = plan.build(expected), SlicedOptimizer(plan, vector, CUTS[cut])
    for step in range(3):
        whole.step(gradient(step), 0.01 * (step + 1))
    train(sliced, vector, range(3), cut)
    assert torch.equal(vector, expected)
    tensors, facts = sliced.state()
    expected_tensors, expected_facts = whole.state()
    assert facts == expected_facts
    assert tensors.keys() == expected_tensors.keys()
    assert all(torch.equal(tensors[name], value) for name, value in expected_tensors.items())


@pytest.mark.parametrize("kind", ["SGD", "Adam", "NAdam", "ASGD", "TF1RMSPropOptimizer"])
def test_a_saved_state_may_be_cut_differently(kind):
    plan, start = plan_of(kind)
    expected, vector = start.clone(), start.clone()
    train(SlicedOptimizer(plan, expected, CUTS["three"]), expected, range(5), "three")
    first = SlicedOptimizer(plan, vector, CUTS["three"])
    train(first, vector, range(2), "three")
    second = SlicedOptimizer(plan, vector, CUTS["two"])
    second.load_state(first.state())
    train(second, vector, range(2, 5), "two")
    assert torch.equal(vector, expected)


def test_before_the_first_step_there_is_no_state_and_it_can_be_loaded():
    plan, vector = plan_of("Adam")
    sliced = SlicedOptimizer(plan, vector, CUTS["three"])
    tensors, facts = sliced.state()
    assert tensors == {}
    sliced.load_state((tensors, facts))
    assert sliced.state()[0] == {}


def test_a_state_of_another_optimizer_is_refused():
    plan, vector = plan_of("Adam")
    other, _ = plan_of("SGD")
    state = SlicedOptimizer(other, vector.clone(), CUTS["two"]).state()
    with pytest.raises(RequestError, match="SGD, not Adam"):
        SlicedOptimizer(plan, vector, CUTS["two"]).load_state(state)


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_slices_of_which_one_is_an_update_ahead_are_told_one_by_one(kind):
    """Adam counts its updates; told as a whole, all slices would take over the count of one of them."""
    plan, vector = plan_of(kind)
    cut, ahead = CUTS["three"], 1
    first = SlicedOptimizer(plan, vector, cut)
    train(first, vector, range(2), "three")
    first.step(ahead, gradient(2)[cut[ahead]], 0.03)
    copy = vector.clone()
    second = SlicedOptimizer(plan, copy, cut)
    second.pieces.load_state(first.pieces.state())
    for number in (0, 2):
        for optimizer in (first, second):
            optimizer.step(number, gradient(2)[cut[number]], 0.03)
    train(first, vector, [3], "three")
    train(second, copy, [3], "three")
    plan_alone, alone = plan_of(kind)
    train(SlicedOptimizer(plan_alone, alone, cut), alone, range(4), "three")
    assert torch.equal(copy, vector)
    assert torch.equal(copy, alone)

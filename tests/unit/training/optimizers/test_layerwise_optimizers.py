"""LARS and LAMB against their rules in numpy, on whole layers of a vector; and what must not be adapted or decay."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from polyrhythm.errors import RequestError
from polyrhythm.specs import build
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.optimizers.lamb import LAMBOptimizer
from polyrhythm.training.optimizers.lars import LARSOptimizer

FOLDER = "polyrhythm.training.optimizers"
SHAPES = [(5, 3), (5,), (4, 2, 3, 3), (4,), (4,), (2, 4), (2,)]  # weights, biases, batch norm
RATES = [0.5, 0.4, 0.1, 0.3, 0.3]


def numbers(seed, dtype=np.float64):
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(shape).astype(dtype) for shape in SHAPES]


def lars_by_hand(momentum=0.9, trust=0.001, eps=1e-9, decay=0.0):
    weights, buffers = numbers(0), [np.zeros(shape) for shape in SHAPES]
    for step, rate in enumerate(RATES):
        for index, gradient in enumerate(numbers(step + 1)):
            w, own_decay = weights[index], decay if weights[index].ndim > 1 else 0.0
            ratio = trust
            if w.ndim > 1:
                norm_w, norm_g = np.sqrt((w**2).sum()), np.sqrt((gradient**2).sum())
                ratio = trust * norm_w / (norm_g + decay * norm_w + eps)
            buffers[index] = momentum * buffers[index] + rate * ratio * (gradient + own_decay * w)
            weights[index] = w - buffers[index]
    return weights


def lamb_by_hand(betas=(0.9, 0.999), eps=1e-6, decay=0.0, correct=True):
    weights = numbers(0)
    means, squares = ([np.zeros(shape) for shape in SHAPES] for _ in range(2))
    for step, rate in enumerate(RATES):
        for index, g in enumerate(numbers(step + 1)):
            w = weights[index]
            means[index] = betas[0] * means[index] + (1 - betas[0]) * g
            squares[index] = betas[1] * squares[index] + (1 - betas[1]) * g * g
            first, second = (1 - beta ** (step + 1) if correct else 1.0 for beta in betas)
            q = (means[index] / first) / (np.sqrt(squares[index] / second) + eps)
            ratio = 1.0
            if w.ndim > 1:
                q = q + decay * w
                ratio = np.sqrt((w**2).sum()) / np.sqrt((q**2).sum())
            weights[index] = w - rate * ratio * q
    return weights


CASES = {
    "lars": lars_by_hand(),
    "lars(momentum=0.5, trust=0.02, eps=0.1)": lars_by_hand(0.5, 0.02, 0.1),
    "lars(weight_decay=0.1, trust=0.02)": lars_by_hand(trust=0.02, decay=0.1),
    "lamb": lamb_by_hand(),
    "lamb(bias_correction=False)": lamb_by_hand(correct=False),
    "lamb(betas=[0.5, 0.8], eps=0.01, weight_decay=0.1)": lamb_by_hand((0.5, 0.8), 0.01, 0.1),
}


class Layers(nn.Module):
    """Parameters of the shapes above, the model of `numbers(0)`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.from_numpy(each)) for each in numbers(0))


def flat(arrays):
    return torch.cat([torch.as_tensor(each).detach().reshape(-1) for each in arrays])


def on_vector(spec, cuts=(), rates=RATES):
    """Trains the flat vector, cut into shards, each by the plan that travels; gives it and the optimizers."""
    model = Layers()
    optimizer = build("optimizer", spec, FOLDER).create(model.parameters())
    whole = FlatParameters(model)
    record = json.dumps(OptimizerPlan.of(optimizer, whole).to_json())
    pieces = [slice(*pair) for pair in pairwise([0, *cuts, whole.size])]
    made = [
        OptimizerPlan.from_json(json.loads(record)).part(piece.start, piece.stop).build(whole.vector[piece])
        for piece in pieces
    ]
    for step, rate in enumerate(rates):
        gradient = flat(numbers(step + 1))
        for each, piece in zip(made, pieces, strict=True):
            each.step(gradient[piece], rate)
    return whole.vector, made


@pytest.mark.parametrize("spec", CASES)
def test_the_rule_in_numpy(spec):
    vector, _ = on_vector(spec)
    torch.testing.assert_close(vector, flat(CASES[spec]), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("spec", CASES)
def test_separate_tensors_and_whole_layers_have_the_same_bits(spec):
    model = Layers()
    optimizer = build("optimizer", spec, FOLDER).create(model.parameters())
    for step, rate in enumerate(RATES):
        for parameter, gradient in zip(model.parameters(), numbers(step + 1), strict=True):
            parameter.grad = torch.from_numpy(gradient)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    vector, _ = on_vector(spec)
    assert torch.equal(flat(model.parameters()), vector)
    assert torch.equal(on_vector(spec, cuts=[15, 92])[0], vector)  # between layers


@pytest.mark.parametrize("spec", ["lars", "lamb"])
def test_a_cut_layer_is_refused_with_what_would_work(spec):
    with pytest.raises(
        RequestError, match=r"looks at whole layers.*use one server, or a strategy.*synchronous"
    ):
        on_vector(spec, cuts=[16])


@pytest.mark.parametrize("spec", CASES)
def test_state_goes_round(spec):
    expected, _ = on_vector(spec)
    half, (first,) = on_vector(spec, rates=RATES[:2])
    tensors, facts = first.state()
    model = Layers()
    plan = OptimizerPlan.of(
        build("optimizer", spec, FOLDER).create(model.parameters()), FlatParameters(model)
    )
    again = plan.build(half)
    again.load_state((tensors, json.loads(json.dumps(facts))))
    for step, rate in enumerate(RATES[2:], start=2):
        again.step(flat(numbers(step + 1)), rate)
    assert torch.equal(half, expected)


def one_step(spec, weight, gradient, rate):
    parameter = nn.Parameter(weight.clone())
    optimizer = build("optimizer", spec, FOLDER).create([parameter])
    parameter.grad = gradient
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return (parameter - weight).detach()


def test_the_length_of_a_step():
    weight, gradient = (torch.from_numpy(numbers(seed)[0]) for seed in (0, 1))
    moved = one_step("lars(momentum=0, trust=0.01, eps=0)", weight, gradient, 0.5)
    torch.testing.assert_close(moved.norm(), 0.5 * 0.01 * weight.norm(), rtol=1e-12, atol=0)
    moved = one_step("lamb(weight_decay=0.1)", weight, gradient, 0.5)
    torch.testing.assert_close(moved.norm(), 0.5 * weight.norm(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("spec", ["lars(momentum=0, eps=0)", "lamb(eps=0)"])
def test_scaling_the_loss_changes_no_step(spec):
    weight, gradient = (torch.from_numpy(numbers(seed)[0]) for seed in (0, 1))
    torch.testing.assert_close(
        one_step(spec, weight, gradient, 0.5),
        one_step(spec, weight, 1000 * gradient, 0.5),
        rtol=1e-12,
        atol=0,
    )


@pytest.mark.parametrize("spec", ["lars(momentum=0)", "lamb"])
def test_the_ratio_is_one_where_a_norm_is_nothing(spec):
    gradient = torch.ones(2, 2, dtype=torch.float64)
    moved = one_step(spec, torch.zeros(2, 2, dtype=torch.float64), gradient, 0.25)
    torch.testing.assert_close(moved, -0.25 * gradient, rtol=1e-5, atol=0)
    still = one_step(spec, gradient, torch.zeros_like(gradient), 0.25)
    assert torch.equal(still, torch.zeros_like(gradient))


def test_vectors_decay_only_if_asked():
    for spec, decays in [
        ("sgd(lr=1, momentum=0, weight_decay=0.5)", [True, True]),
        ("sgd(lr=1, momentum=0, weight_decay=0.5, decay_vectors=False)", [True, False]),
        ("adam(weight_decay=0.5, decay_vectors=False)", [True, False]),
        ("adamw(decay_vectors=False)", [True, False]),
        ("tf1_rmsprop(weight_decay=0.5, decay_vectors=False)", [True, False]),
        ("adagrad(weight_decay=0.5, decay_vectors=False)", [True, False]),
        ("adadelta(weight_decay=0.5, decay_vectors=False)", [True, False]),
        ("nadam(weight_decay=0.5, decay_vectors=False)", [True, False]),
        ("rmsprop(weight_decay=0.5, decay_vectors=False)", [True, False]),
        ("lars(weight_decay=0.5)", [True, False]),
        ("lars(weight_decay=0.5, decay_vectors=True)", [True, True]),
        ("lamb(weight_decay=0.5)", [True, False]),
    ]:
        model = nn.Linear(3, 2)
        optimizer = build("optimizer", spec, FOLDER).create(model.parameters())
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        moved = [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
        assert moved == decays, spec


def test_groups_with_options_of_their_own_stay_apart():
    model = nn.Linear(3, 2)
    groups = [{"params": [model.weight], "lr": 0.3}, {"params": [model.bias], "lr": 0.6}]
    made = build("optimizer", "sgd(weight_decay=0.5, decay_vectors=False)", FOLDER).create(groups)
    assert [(group["lr"], group["weight_decay"]) for group in made.param_groups] == [(0.3, 0.5), (0.6, 0.0)]


@pytest.mark.parametrize("kind", [LARSOptimizer, LAMBOptimizer])
def test_an_unknown_option_is_refused(kind):
    with pytest.raises(TypeError, match="has no 'nesterov'"):
        kind(nn.Linear(2, 2).parameters(), nesterov=True)


@pytest.mark.parametrize("kind", [LARSOptimizer, LAMBOptimizer])
def test_a_closure_is_called_with_gradients(kind):
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.1)

    def closure():
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0

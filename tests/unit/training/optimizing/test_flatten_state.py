"""An optimizer taken apart, stored and put together again goes on as if nothing had happened."""

import json

import pytest
import torch
from torch import nn

from polyrhythm.errors import RequestError
from polyrhythm.specs import build, choices
from polyrhythm.training.checkpoint import load_checkpoint, save_checkpoint
from polyrhythm.training.flat_optimizer import pack_optimizer_state, unpack_optimizer_state

FOLDER = "polyrhythm.training.optimizers"
SPECS = [
    *choices(FOLDER),
    "sgd(momentum=0)",
    "sgd(nesterov=True, weight_decay=0.01)",
    "adagrad(lr_decay=0.1)",
    "rmsprop(momentum=0.9, centered=True)",
    "adam(amsgrad=True, betas=[0.8, 0.9])",
    "tf1_rmsprop(momentum=0.9)",
]


def weights_of(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 3), (5,), ()]
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in shapes
    ]


def advance(optimizer, weights, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for weight in weights:
            gradient = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.grad = gradient.to(weight.dtype)
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.step()


def assert_same_bits(one, other):
    for name, tensor in one.items():
        assert other[name].dtype == tensor.dtype
        assert torch.equal(other[name], tensor)
    assert one.keys() == other.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS)
def test_a_resumed_optimizer_goes_on_bit_for_bit(tmp_path, spec, dtype):
    create = build("optimizer", spec, FOLDER).create
    whole = weights_of(dtype)
    uninterrupted = create(whole)
    advance(uninterrupted, whole, range(4))
    tensors, facts = pack_optimizer_state(uninterrupted)
    save_checkpoint(tmp_path / "state.safetensors", tensors, facts)

    resumed = [nn.Parameter(weight.detach().clone()) for weight in whole]
    optimizer = create(resumed)
    unpack_optimizer_state(optimizer, *load_checkpoint(tmp_path / "state.safetensors"))
    assert_same_bits(tensors, pack_optimizer_state(optimizer)[0])
    advance(uninterrupted, whole, range(4, 9))
    advance(optimizer, resumed, range(4, 9))

    for weight, expected in zip(resumed, whole, strict=True):
        assert torch.equal(weight, expected)
    assert_same_bits(pack_optimizer_state(uninterrupted)[0], pack_optimizer_state(optimizer)[0])
    assert pack_optimizer_state(optimizer)[1] == pack_optimizer_state(uninterrupted)[1]


def test_names_and_facts():
    weights = weights_of(torch.float32)
    optimizer = torch.optim.Adam([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.5}])
    advance(optimizer, weights, range(1))
    tensors, facts = pack_optimizer_state(optimizer)
    assert sorted(tensors) == [
        f"state.{index}.{key}" for index in range(3) for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    assert tensors["state.0.exp_avg"] is optimizer.state[weights[0]]["exp_avg"]
    facts = json.loads(json.dumps(facts))
    assert facts["optimizer"] == "Adam"
    assert facts["shapes"] == [[[7, 3]], [[5], []]]
    assert [group["lr"] for group in facts["groups"]] == [0.001 * 0.9, 0.5]
    unpack_optimizer_state(optimizer, tensors, facts)
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.999)


def test_the_copy_is_independent():
    weights, others = weights_of(torch.float32), weights_of(torch.float32)
    one, other = torch.optim.SGD(weights, momentum=0.9), torch.optim.SGD(others, momentum=0.9)
    advance(one, weights, range(2))
    tensors, facts = pack_optimizer_state(one)
    kept = tensors["state.0.momentum_buffer"].clone()
    unpack_optimizer_state(other, tensors, facts)
    advance(other, others, range(2))
    assert torch.equal(one.state[weights[0]]["momentum_buffer"], kept)


def test_an_optimizer_that_has_not_stepped():
    weights = weights_of(torch.float32)
    fresh, used = torch.optim.Adam(weights), torch.optim.Adam(weights)
    advance(used, weights, range(1))
    unpack_optimizer_state(used, *pack_optimizer_state(fresh))
    assert not used.state


def test_values_that_are_no_tensors_survive():
    weights = weights_of(torch.float32)
    one, other = torch.optim.SGD(weights), torch.optim.SGD(weights)
    one.state[weights[1]]["rounds"] = 3
    tensors, facts = pack_optimizer_state(one)
    unpack_optimizer_state(other, tensors, json.loads(json.dumps(facts)))
    assert other.state[weights[1]] == {"rounds": 3}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: torch.optim.Adam(weights_of(torch.float32)), "of the optimizer SGD, not Adam"),
        (
            lambda: torch.optim.SGD(weights_of(torch.float32)[:2]),
            "3 tensors of 27 numbers.*2 tensors of 26 numbers",
        ),
        (
            lambda: torch.optim.SGD([{"params": [weight]} for weight in weights_of(torch.float32)]),
            "other parameters",
        ),
    ],
)
def test_refuses_the_state_of_another(other, message):
    weights = weights_of(torch.float32)
    one, target = torch.optim.SGD(weights, momentum=0.9), other()
    advance(one, weights, range(1))
    before = pack_optimizer_state(target)
    with pytest.raises(RequestError, match=message):
        unpack_optimizer_state(target, *pack_optimizer_state(one))
    assert pack_optimizer_state(target) == before


def test_refuses_what_a_checkpoint_cannot_hold():
    weights = weights_of(torch.float32)
    optimizer = torch.optim.SGD(weights)
    optimizer.state[weights[0]]["history"] = [torch.zeros(1)]
    with pytest.raises(RequestError, match="SGD's state 'history' is a list"):
        pack_optimizer_state(optimizer)

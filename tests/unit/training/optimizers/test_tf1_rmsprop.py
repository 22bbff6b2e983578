"""TensorFlow 1's RMSProp: known first steps, and what an ordinary optimizer must be able to do."""

import pytest
import torch
from torch import nn

from polyrhythm.training.optimizers.rmsprop import RMSProp
from polyrhythm.training.optimizers.tf1_rmsprop import TF1RMSProp, TF1RMSPropOptimizer


def first_step(optimizer_of, gradient):
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = optimizer_of([weight])
    weight.grad = torch.full_like(weight, gradient)
    optimizer.step()
    return -weight.item()


@pytest.mark.parametrize(
    ("gradient", "tensorflow", "pytorch"), [(0.1, 0.0072529, 0.0096935), (10, 0.28989, 0.24025)]
)
def test_first_step_has_the_known_value_and_not_pytorchs(gradient, tensorflow, pytorch):
    assert first_step(TF1RMSProp().create, gradient) == pytest.approx(tensorflow, rel=1e-4)
    ours = RMSProp(lr=0.1, alpha=0.9, eps=1.0)
    assert first_step(ours.create, gradient) == pytest.approx(pytorch, rel=1e-4)


def test_the_mean_square_starts_at_one():
    # with a start of 0 the first step would be 0.0099950
    assert first_step(TF1RMSProp().create, 0.1) == pytest.approx(
        0.1 * 0.1 / (0.9 + 0.1 * 0.01 + 1) ** 0.5, rel=1e-12
    )


def test_a_changed_rate_leaves_the_momentum_buffer_alone():
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = TF1RMSProp(lr=1.0, decay=0.0, momentum=0.5, epsilon=3.0).create([weight])
    for rate, gradient in [(1.0, 1.0), (0.5, 1.0), (0.0, 1.0)]:
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
    # every scaled gradient is lr * 1 / sqrt(1 + 3): u = 0.5, then 0.25 + 0.25, then 0.25
    assert weight.item() == -(0.5 + 0.5 + 0.25)


def test_the_defaults_are_bscs():
    assert TF1RMSProp().model_dump() == {
        "lr": 0.1,
        "weight_decay": 0.0,
        "decay_vectors": True,
        "clip_norm": None,
        "decay": 0.9,
        "momentum": 0.0,
        "epsilon": 1.0,
    }


def test_a_parameter_without_gradient_stays():
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    optimizer = TF1RMSPropOptimizer(weights)
    weights[0].grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(weights[1], torch.ones(2))
    assert list(optimizer.state) == [weights[0]]


def test_the_gradient_is_left_as_it_was():
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.tensor([1.0, 2.0, 3.0])
    TF1RMSPropOptimizer([weight], momentum=0.9, weight_decay=0.1).step()
    assert torch.equal(weight.grad, torch.tensor([1.0, 2.0, 3.0]))


def test_groups_have_options_of_their_own():
    slow, fast = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = TF1RMSPropOptimizer([{"params": [slow]}, {"params": [fast], "lr": 0.2}])
    slow.grad = fast.grad = torch.ones(1)
    optimizer.step()
    assert fast.item() == pytest.approx(2 * slow.item())


def test_a_closure_is_evaluated_with_gradients():
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = TF1RMSPropOptimizer([weight])

    def closure():
        loss = (weight**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert weight.item() == pytest.approx(2 - 0.1 * 4 / (0.9 + 1.6 + 1) ** 0.5)

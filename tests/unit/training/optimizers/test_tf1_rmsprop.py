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


def test_a_closure_is_evaluated_with_gradients():
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = TF1RMSPropOptimizer([weight])

    def closure():
        loss = (weight**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert weight.item() == pytest.approx(2 - 0.1 * 4 / (0.9 + 1.6 + 1) ** 0.5)

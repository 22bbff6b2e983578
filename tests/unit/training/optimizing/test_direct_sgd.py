"""SGD without torch's loop around it: torch's bits, whatever the options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from polyrhythm.training.flat_optimizer import DirectSGD
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan

OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.01},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
    {"momentum": 0.7, "dampening": 0.3},
]


def pair(**options: Any) -> tuple[torch.optim.SGD, torch.optim.SGD]:
    """Gives two equal optimisers, each of a vector of its own."""
    vectors = [nn.Parameter(torch.linspace(-1, 1, 101)) for _ in range(2)]
    first, second = (torch.optim.SGD([vector], lr=0.1, foreach=False, **options) for vector in vectors)
    return first, second


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_steps_have_the_bits_of_torchs_own(options: dict[str, Any]) -> None:
    ours, theirs = pair(**options)
    direct = DirectSGD(ours)
    torch.manual_seed(0)
    made = 0
    for step in range(6):
        gradient = torch.randn(101)
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.param_groups[0]["params"][0].grad = gradient.clone()
        if direct.step():
            made += 1
        else:
            ours.step()
        theirs.step()
        mine, reference = (each.param_groups[0]["params"][0] for each in (ours, theirs))
        assert torch.equal(mine, reference)
        assert torch.equal(mine.grad, gradient)
    assert made == (5 if options.get("momentum") else 6)  # torch makes the momentum


@pytest.mark.parametrize("options", [{"maximize": True}, {"momentum": 0.9}], ids=str)
def test_what_is_out_of_the_ordinary_is_left_to_torch(options: dict[str, Any]) -> None:
    optimizer, _ = pair(**options)
    vector = optimizer.param_groups[0]["params"][0]
    vector.grad = torch.ones(101)
    before = vector.detach().clone()
    assert not DirectSGD(optimizer).step()
    assert torch.equal(vector, before)


def test_groups_of_a_flat_vector_keep_their_own_options() -> None:
    """Half precision goes torch's way, single precision ours: both as torch does it parameter by parameter."""
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(1)
        models = [nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        groups = [
            [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters(), "momentum": 0.0}]
            for model in models
        ]
        ours, theirs = (torch.optim.SGD(each, lr=0.1, momentum=0.9, foreach=False) for each in groups)
        flat = FlatParameters(models[0])
        optimizer = OptimizerPlan.of(ours, flat).build(flat.vector)
        for _ in range(3):
            gradient = torch.randn(flat.size).to(dtype)
            for view, parameter in zip(flat.views, models[1].parameters(), strict=True):
                parameter.grad = gradient[view.start : view.stop].view(parameter.shape).clone()
            optimizer.step(gradient, 0.5)
            theirs.step()
        assert torch.equal(
            flat.vector, torch.cat([each.detach().view(-1) for each in models[1].parameters()])
        )

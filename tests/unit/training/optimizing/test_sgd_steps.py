"""SGD without torch's loop around it: torch's bits, whatever the options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import sgd

from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan

OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.01},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
    {"momentum": 0.7, "dampening": 0.3},
]


@pytest.fixture
def steps_of_torch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects an entry for each step that torch's own arithmetic makes."""
    made: list[int] = []
    arithmetic = sgd.sgd

    def counted(params: list[Tensor], *args: Any, **options: Any) -> None:
        made.append(len(params))
        arithmetic(params, *args, **options)

    monkeypatch.setattr(sgd, "sgd", counted)
    return made


def train(steps: int, **options: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Makes steps on two equal vectors, by our optimizer and by torch's; yields both after each."""
    torch.manual_seed(0)
    module, reference = (nn.Linear(100, 1) for _ in range(2))
    reference.load_state_dict(module.state_dict())
    ours, theirs = (
        torch.optim.SGD(each.parameters(), lr=0.1, foreach=False, **options) for each in (module, reference)
    )
    flat = FlatParameters(module)
    optimizer = OptimizerPlan.of(ours, flat).build(flat.vector)
    for step in range(steps):
        gradient = torch.randn(flat.size)
        before = gradient.clone()
        theirs.param_groups[0]["lr"] = 0.1 / (step + 1)
        for parameter, part in zip(reference.parameters(), gradient.split([100, 1]), strict=True):
            parameter.grad = part.view(parameter.shape).clone()
        optimizer.step(gradient, 0.1 / (step + 1))
        assert torch.equal(gradient, before)
        theirs.step()
        yield flat.vector, torch.cat([each.detach().view(-1) for each in reference.parameters()])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_steps_have_the_bits_of_torchs_own(options: dict[str, Any], steps_of_torch: list[int]) -> None:
    for ours, theirs in train(6, **options):
        assert torch.equal(ours, theirs)
    # Torch makes the reference's, of two parameters each, and of ours the one that makes the momentum.
    assert steps_of_torch.count(2) == 6
    assert steps_of_torch.count(1) == (1 if options.get("momentum") else 0)


def test_what_is_out_of_the_ordinary_is_left_to_torch(steps_of_torch: list[int]) -> None:
    for ours, theirs in train(3, maximize=True):
        assert torch.equal(ours, theirs)
    assert steps_of_torch.count(1) == 3


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

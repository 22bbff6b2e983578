"""A user's SGD on the whole flat vector, bit for bit as torch's own on every parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan, SGDAtOnce


def made(options: dict[str, Any], dtype: torch.dtype) -> tuple[nn.Module, torch.optim.SGD]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(dtype)
    return model, torch.optim.SGD(model.parameters(), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3},
    ],
)
def test_its_bits_are_torchs(
    options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, theirs = made(options, dtype)
    model, ours = made(options, dtype)
    flat = FlatParameters(model)
    own = OptimizerPlan.of(ours, flat, keeps=True).own
    assert own is not None
    taken: list[bool] = []
    step = SGDAtOnce.step

    def noted(self: SGDAtOnce) -> bool:
        taken.append(step(self))
        return taken[-1]

    monkeypatch.setattr(SGDAtOnce, "step", noted)
    for number in range(9):
        missing = (1,) if number == 3 else ()
        flat.without_gradient = missing
        for position, (mine, other) in enumerate(
            zip(model.parameters(), reference.parameters(), strict=True)
        ):
            gradient = torch.randn(mine.shape, dtype=dtype)
            mine.grad.copy_(0 * gradient if position in missing else gradient)  # type: ignore[union-attr]
            other.grad = None if position in missing else gradient
        ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.1 / (number + 1)
        if number == 5:  # a state that was loaded is another object
            ours.load_state_dict(ours.state_dict())
        own.step(flat.gradients, 0.0)
        theirs.step()
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(mine, other)
            if options.get("momentum"):
                assert torch.equal(
                    ours.state[mine]["momentum_buffer"], theirs.state[other]["momentum_buffer"]
                )
    assert taken == [not options.get("momentum"), *[True] * 7]


def test_gradients_that_a_loop_has_set_itself_are_those_that_count() -> None:
    model, ours = made({"lr": 0.1}, torch.float64)
    flat = FlatParameters(model)
    own = OptimizerPlan.of(ours, flat, keeps=True).own
    first, *others = list(model.parameters())
    before = [each.detach().clone() for each in model.parameters()]
    first.grad = torch.ones_like(first)
    others[0].grad = None
    flat.gradients.fill_(2.0)
    assert own is not None
    own.step(flat.gradients, 0.0)
    moved = [
        float((each.detach() - was).mean()) for each, was in zip(model.parameters(), before, strict=True)
    ]
    assert moved == pytest.approx([-0.1, 0.0, -0.2, -0.2])


@pytest.mark.parametrize("of_all", [False, True])
def test_hooks_are_called(of_all: bool) -> None:
    model, ours = made({"lr": 0.1}, torch.float32)
    flat = FlatParameters(model)
    own = OptimizerPlan.of(ours, flat, keeps=True).own
    assert own is not None
    called: list[str] = []
    register = register_optimizer_step_pre_hook if of_all else ours.register_step_pre_hook
    handle = register(lambda *_: called.append("before"))
    own.step(flat.gradients, 0.0)
    handle.remove()
    assert called == ["before"]

"""The user's own optimizer object, with states that loops saved before it made the steps itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from polyrhythm.errors import RequestError
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan

Made = tuple[FlatParameters, torch.optim.Optimizer, OptimizerPlan]


def made(kind: type[torch.optim.Optimizer], frozen: bool, **options: Any) -> Made:
    """Return an optimizer with a group for the last layer, another for the first, and maybe a frozen one between."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    model[1].requires_grad_(not frozen)
    groups = [
        {"params": model[2].parameters(), "lr": 0.05},
        {"params": [*model[1].parameters(), *model[0].parameters()]},
    ]
    optimizer = kind(groups, lr=0.1, **options)  # type: ignore[call-arg]
    flat = FlatParameters(model, also=list(model.parameters()))
    return flat, optimizer, OptimizerPlan.of(optimizer, flat, keeps=True)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {"weight_decay": 0.1}), (torch.optim.SGD, {})],
)
def test_a_state_of_spans_is_that_of_the_parameters_in_them(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], frozen: bool
) -> None:
    flat, _, plan = made(kind, frozen, **options)
    before = plan.build(flat.vector)
    gradient = torch.linspace(-1, 1, flat.size, dtype=torch.float64)
    for _ in range(3):
        before.step(gradient, 0.05 if plan.rate == 0.05 else 0.1)
    saved = before.state()

    other, _, again = made(kind, frozen, **options)
    other.vector.copy_(flat.vector)
    own = again.whole(other.vector)
    own.load_state(saved)
    before.step(gradient, 0.05 if plan.rate == 0.05 else 0.1)
    other.gradients.copy_(gradient)
    other.without_gradient = tuple(
        each for each, view in enumerate(other.views) if not view.parameter.requires_grad
    )
    own.step(other.gradients, 0.0)
    torch.testing.assert_close(other.vector, flat.vector, rtol=1e-15, atol=1e-15)


def test_a_state_of_another_model_is_refused() -> None:
    flat, _, plan = made(torch.optim.SGD, frozen=False, momentum=0.9)
    before = plan.build(flat.vector)
    before.step(flat.vector, 0.1)
    tensors, facts = before.state()
    with pytest.raises(RequestError, match="of other parameters"):
        plan.whole(flat.vector).load_state(
            (tensors, {**facts, "shapes": facts["shapes"][:-1], "groups": facts["groups"][:-1]})
        )

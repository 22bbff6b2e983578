"""Steps of a flat optimizer with options of their own, and only in places, against torch on separate parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from polyrhythm.training.flat_optimizer import FlatOptimizer, Span

SIZES = [(0, 3), (3, 4), (4, 9)]
TRAINED = [(0, 1, 2), (0, 2), (1,), (0, 1, 2), (2,), ()]
"""Which of three parameters have a gradient, step by step."""


@pytest.mark.parametrize("first", [(0, 1, 2), (0, 2), (1,)], ids=["all", "hole", "one"])
@pytest.mark.parametrize("saved_after", [0, 2, 4])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        ("Adam", {"lr": 0.1, "weight_decay": 0.01}),
        ("RMSprop", {"lr": 0.1, "momentum": 0.5}),
    ],
)
def test_they_are_torchs(
    kind: str, options: dict[str, Any], saved_after: int, first: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    start = torch.randn(9, dtype=torch.float64)
    separate = [nn.Parameter(start[a:b].clone()) for a, b in SIZES]
    reference = getattr(torch.optim, kind)([{"params": [each]} for each in separate], **options)
    vector = start.clone()
    full = {
        key: value
        for key, value in reference.param_groups[0].items()
        if key not in ("params", "foreach", "fused")
    }
    began = [Span(*SIZES[at], full) for at in first]
    flat = FlatOptimizer(kind, began, 0.1, vector)
    for step, trained in enumerate(TRAINED):
        gradient = torch.randn(9, dtype=torch.float64)
        decay = 0.02 * step
        for at, ((a, b), each, group) in enumerate(zip(SIZES, separate, reference.param_groups, strict=True)):
            each.grad = gradient[a:b].clone() if at in trained else None
            group.update(lr=0.05 * (at + 1), weight_decay=decay)
        reference.step()
        spans = [Span(*SIZES[at], full | {"lr": 0.05 * (at + 1), "weight_decay": decay}) for at in trained]
        flat.step_as(gradient, 0.3, spans, 0.3)
        if step == saved_after:
            state = flat.state()
            flat = FlatOptimizer(kind, began, 0.1, vector)
            flat.load_state(state)
    torch.testing.assert_close(
        vector, torch.cat([each.detach() for each in separate]), rtol=1e-14, atol=1e-14
    )


def test_later_steps_without_a_plan_are_as_at_the_start() -> None:
    vector = torch.ones(4, dtype=torch.float64)
    flat = FlatOptimizer("SGD", [Span(0, 2, {"lr": 1.0})], 1.0, vector)
    flat.step_as(torch.ones(4, dtype=torch.float64), 0.5, [Span(1, 4, {"lr": 0.5})], 0.5)
    assert vector.tolist() == [1.0, 0.5, 0.5, 0.5]
    flat.step(torch.ones(4, dtype=torch.float64), 1.0)
    assert vector.tolist() == [0.0, -0.5, 0.5, 0.5]

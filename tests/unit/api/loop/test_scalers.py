"""A `GradScaler` where each worker goes at its own pace: each has its own scale, and servers see none of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.api.join import Group
from tolerances import REORDERED
from unit.api.loop.test_what_others_follow import FREE, OWN_MODEL, PUSHING, drawn
from unit.api.loop.threads import run_in_threads

STEPS, OVERFLOWS = 7, 3


def scaled(
    model: nn.Module, optimizer: Any, seed: torch.Generator, overflows: bool, clips: bool
) -> list[float]:
    """Take steps with a scale that grows every second one; return it after each."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scales = []
    for step in range(STEPS):
        inputs = torch.randn(6, 4, generator=seed).double()
        loss = nn.functional.cross_entropy(model(inputs), torch.arange(6) % 3)
        if overflows and step == OVERFLOWS:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


def alone(overflows: bool, clips: bool) -> tuple[Tensor, list[float]]:
    model, seed = drawn()
    scales = scaled(model, sgd(model), seed, overflows, clips)
    return nn.utils.parameters_to_vector(model.parameters()).detach(), scales


def among(group: Group, overflows: bool, clips: bool) -> tuple[Tensor, list[float]]:
    model, seed = drawn()
    with group:
        model, optimizer = group.distribute(model, sgd(model))
        scales = scaled(model, optimizer, seed, overflows, clips)
    return nn.utils.parameters_to_vector(model.parameters()).detach(), scales


@pytest.mark.parametrize("clips", [False, True], ids=["plain", "clipped"])
@pytest.mark.parametrize("strategy", [*PUSHING, *OWN_MODEL])
def test_a_single_worker_leaves_out_the_step_that_torch_leaves_out(strategy: str, clips: bool) -> None:
    (found,) = run_in_threads(strategy, 1, lambda group: among(group, True, clips))
    expected = alone(True, clips)
    assert found[1] == expected[1]
    torch.testing.assert_close(found[0], expected[0], **REORDERED)


@pytest.mark.parametrize("strategy", [*FREE, "ssp", "downpour", "easgd", "hogwild", "ad_psgd"])
def test_each_worker_has_its_own_scale_and_no_overflow_reaches_the_others(strategy: str) -> None:
    found = run_in_threads(strategy, 2, lambda group: among(group, group.rank == 1, group.rank == 0))
    assert [scales for _, scales in found] == [alone(overflows, False)[1] for overflows in (False, True)]
    assert found[0][1] != found[1][1]
    assert torch.equal(found[0][0], found[1][0])
    assert bool(found[0][0].isfinite().all())
    before = nn.utils.parameters_to_vector(drawn()[0].parameters()).detach()
    assert float((found[0][0] - before).norm()) < 1.0, (
        "pushed with their scale, gradients would be 8 times as large"
    )

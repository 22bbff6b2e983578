"""What a successor takes over of schedulers: the next rates are those of the scheduler that it stands for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from polyrhythm.api.loop.position import plain_state, take_state

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5, 6]),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 9),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[4],
    ),
}


def made(name: str) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    return optimizer, SCHEDULERS[name](optimizer)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_where_another_was(name: str) -> None:
    optimizer, scheduler = made(name)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    handed = json.loads(json.dumps(plain_state(scheduler)))

    other, successor = made(name)
    other.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
    take_state(successor, handed)
    for _ in range(4):
        for stepped in (optimizer, scheduler, other, successor):
            stepped.step()
        assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_plateau_is_remembered() -> None:
    optimizer, successor_of = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4) for _ in "ab"]
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    successor = lr_scheduler.ReduceLROnPlateau(successor_of, patience=1)
    for loss in (1.0, 1.0):
        scheduler.step(loss)
    take_state(successor, json.loads(json.dumps(plain_state(scheduler))))
    for each in (scheduler, successor):
        each.step(1.0)
    assert [each.param_groups[0]["lr"] for each in (optimizer, successor_of)] == pytest.approx([0.04, 0.04])


def test_what_is_not_plain_stays_the_successors_own() -> None:
    class Counted:
        def __init__(self, steps: int, table: Any) -> None:
            self.state = {"steps": steps, "table": table, "pair": (1, steps)}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    own = torch.ones(2)
    kept = Counted(0, own)
    take_state(kept, json.loads(json.dumps(plain_state(Counted(7, torch.zeros(2))))))
    assert kept.state["steps"] == 7
    assert kept.state["pair"] == (1, 7)
    assert kept.state["table"] is own

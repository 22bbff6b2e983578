"""What a group's first member shares with the others travels in the dtype of the parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from polyrhythm.strategies.parameter_server.mixed import ServersOfGroup
from polyrhythm.strategies.worker_part import Step
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan


class Answers:
    """A link whose servers have a number of contributions."""

    def __init__(self, reached: int) -> None:
        self.reached = reached

    def pull(self) -> int:
        return self.reached

    def push_and_pull(self, step: Step, weight: float, learning_rate: float) -> bool:
        self.reached = step.number + 1
        return True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("reached", [0, 255, 257, 1001, 65_535])
def test_the_number_of_contributions_is_exact_in_every_dtype(reached: int, dtype: torch.dtype) -> None:
    setting: Any = SimpleNamespace(flat=FlatParameters(nn.Linear(2, 1).to(dtype)))
    group: Any = SimpleNamespace(rank=0, size=1, broadcast=lambda tensor: None)
    servers = ServersOfGroup(setting, OptimizerPlan("SGD", (), 1.0), 0)
    servers.group, servers._link = group, Answers(reached)  # type: ignore[assignment]
    servers.pull()
    assert servers.reached == reached
    assert servers.push(Step(reached), 0.1)
    assert servers.reached == reached + 1

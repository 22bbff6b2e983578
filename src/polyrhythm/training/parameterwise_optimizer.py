"""The part that optimisers of our own share: a step that goes through the parameters one by one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class ParameterwiseOptimizer(torch.optim.Optimizer):
    """An optimiser whose rule sees one parameter, its gradient and its state at a time."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes one step: changes the parameters and the state in place.

        Args:
            closure: evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)
        return loss

    @abstractmethod
    def _step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Changes a parameter and `self.state[parameter]` in place."""

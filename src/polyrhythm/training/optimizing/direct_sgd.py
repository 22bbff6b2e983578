"""Steps of torch's SGD over one vector, without what torch does around the arithmetic.

    d = g + weight_decay * w      m = momentum * m + (1 - dampening) * d      w = w - lr * m

The same operations in the same order as `torch.optim.SGD` without `foreach` and `fused`, so the same bits. For a model
of a few thousand numbers, what torch asks and prepares takes several times as long as the three operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class DirectSGD:
    """An optimiser's steps; its groups and its state stay where torch keeps them.

    Args:
        optimizer: with one parameter a group.
    """

    def __init__(self, optimizer: torch.optim.SGD) -> None:
        self._optimizer = optimizer
        self._factors: dict[float, Tensor] = {}

    def step(self) -> bool:
        """Makes a step; gives whether it has: torch itself makes the first one, and those that are out of the ordinary.

        Returns:
            False where nothing has been done.
        """
        groups, state = self._optimizer.param_groups, self._optimizer.state
        momenta = [state[group["params"][0]].get("momentum_buffer") for group in groups]
        if not all(map(_is_ordinary, groups, momenta)):
            return False
        for group, momentum in zip(groups, momenta, strict=True):
            self._update(group, momentum)
        return True

    def _update(self, group: dict[str, Any], momentum: Tensor | None) -> None:
        parameter = group["params"][0]
        values, change = parameter.detach(), parameter.grad
        if group["weight_decay"]:
            change = change.add(values, alpha=group["weight_decay"])
        if momentum is not None:
            momentum.mul_(self._factor(group["momentum"])).add_(change, alpha=1 - group["dampening"])
            change = change.add(momentum, alpha=group["momentum"]) if group["nesterov"] else momentum
        values.add_(change, alpha=-group["lr"])

    def _factor(self, number: float) -> Tensor:
        """Gives a number as a tensor, which torch would make anew in every operation."""
        if number not in self._factors:
            self._factors[number] = torch.tensor(number, dtype=torch.float32)
        return self._factors[number]


def _is_ordinary(group: dict[str, Any], momentum: Tensor | None) -> bool:
    parameter = group["params"][0]
    return (
        parameter.dtype == torch.float32
        and not parameter.is_cuda
        and not group["maximize"]
        and not group["differentiable"]
        and bool(group["momentum"]) == (momentum is not None)
        and parameter.grad is not None
    )

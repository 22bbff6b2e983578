"""What all optimisers' configurations have in common, and the base class of the project's own optimisers.

`ParameterwiseOptimizer` is a step that goes through the parameters one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from polyrhythm.specs import Config
from polyrhythm.training.quantities import NonNegative, Positive

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


class OptimizerConfig(Config, ABC):
    """An optimiser's keys; `create` makes the optimiser.

    All of them make ordinary `torch.optim` objects. Those that are not `layerwise` treat every element alone: one
    flat vector, any slice of it, and the separate tensors that it was made of come out the same, bit for bit.
    torch's `fused` form is never asked for: its vector body and scalar tail round differently, so that a result
    would depend on where in memory a number lies.

    Attributes:
        layerwise: whether it looks at whole layers, so that it can run on no slice that cuts one.
        lr: the learning rate, before any schedule.
        weight_decay: L2: this times the parameter is added to the gradient, before anything else.
        decay_vectors: whether parameters of one dimension (biases, batch norm) decay as well.
    """

    layerwise: ClassVar[bool] = False

    lr: Positive
    weight_decay: NonNegative = 0.0
    decay_vectors: bool = True

    @abstractmethod
    def create(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Make the optimiser of these parameters, which it changes in place at every step."""

    def groups(self, parameters: Iterable[Any]) -> list[Any]:
        """Return what a `torch.optim` optimiser takes, with the parameters that must not decay in a group of their own.

        Args:
            parameters: as given to `create`: parameters, or groups of them.
        """
        given = list(parameters)
        if self.decay_vectors:
            return given
        return apart(given, {"weight_decay": 0.0})


def apart(parameters: list[Any], of_vectors: dict[str, Any]) -> list[dict[str, Any]]:
    """Put parameters of one dimension or none (biases, batch norm) into groups of their own.

    Args:
        parameters: parameters, or groups of them.
        of_vectors: options of the groups of such parameters.
    """
    groups = [{"params": parameters}] if parameters and isinstance(parameters[0], Tensor) else parameters
    found = []
    for group in groups:
        members = list(group["params"])
        matrices = [each for each in members if each.ndim > 1]
        vectors = [each for each in members if each.ndim <= 1]
        found += [{**group, "params": matrices}] if matrices else []
        found += [{**group, **of_vectors, "params": vectors}] if vectors else []
    return found


class ParameterwiseOptimizer(torch.optim.Optimizer):
    """An optimiser whose rule sees one parameter, its gradient and its state at a time."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step: change the parameters and the state in place.

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
        """Change a parameter and `self.state[parameter]` in place."""

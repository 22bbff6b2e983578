"""Common base of all optimizers' configurations, and the base class of the project's own optimizers.

`ParameterwiseOptimizer` is a step that goes through the parameters one by one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from polyrhythm.specs import Config
from polyrhythm.training.quantities import NonNegative, Positive

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


class OptimizerConfig(Config):
    """An optimizer's keys; `create` makes the optimizer.

    All of them make ordinary `torch.optim` objects. Those that are not `layerwise` treat every element alone:
    one flat vector, any slice of it, and the separate tensors that it was made of give the same result, bit
    for bit. torch's `fused` form is never used: its vector body and scalar tail round differently, so that a
    result would depend on the position of a number in memory.

    Attributes:
        kind: class of the optimizer; its arguments have the names of the keys.
        layerwise: whether it looks at whole layers, so that it can run on no slice that cuts one.
        for_vectors: options of parameters of one dimension (biases, batch norm) that are not those of the others.
        lr: the learning rate, before any schedule.
        weight_decay: L2: this times the parameter is added to the gradient, before anything else.
        decay_vectors: whether parameters of one dimension decay as well.
        clip_norm: bound of the total norm of the gradients, as of `torch.nn.utils.clip_grad_norm_`; None: no bound.
    """

    kind: ClassVar[Callable[..., torch.optim.Optimizer]]
    layerwise: ClassVar[bool] = False
    for_vectors: ClassVar[dict[str, Any]] = {}

    lr: Positive
    weight_decay: NonNegative = 0.0
    decay_vectors: bool = True
    clip_norm: Positive | None = None

    def create(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Make the optimizer of these parameters, or groups of them, which it changes in place at every step."""
        made = self.of_groups(self.groups(parameters))
        if self.clip_norm is not None:
            for group in made.param_groups:
                group["clip_norm"] = self.clip_norm  # for `OptimizerPlan.of`
        return made

    def of_groups(self, groups: list[Any]) -> torch.optim.Optimizer:
        """Make the optimizer of parameters, or groups of them, without clipping."""
        return type(self).kind(groups, **self.model_dump(exclude={"decay_vectors", "clip_norm"}))

    @property
    def follows_staleness(self) -> bool:
        """Whether it needs the age of each gradient, as servers of `Traits.measures_staleness` know it."""
        return False

    def groups(self, parameters: Iterable[Any]) -> list[Any]:
        """Return parameters, or groups of them, with those of one dimension or none apart where options differ."""
        given = list(parameters)
        of_vectors = self.for_vectors if self.decay_vectors else {**self.for_vectors, "weight_decay": 0.0}
        if not of_vectors:
            return given
        groups = [{"params": given}] if given and isinstance(given[0], Tensor) else given
        found = []
        for group in groups:
            members = list(group["params"])
            matrices = [each for each in members if each.ndim > 1]
            vectors = [each for each in members if each.ndim <= 1]
            found += [{**group, "params": matrices}] if matrices else []
            found += [{**group, **of_vectors, "params": vectors}] if vectors else []
        return found


class ParameterwiseOptimizer(torch.optim.Optimizer):
    """An optimizer with a rule for one parameter, its gradient and its state at a time.

    Args:
        params: parameters, or groups of them, as for every `torch.optim` optimizer.
        options: options of all groups without their own.

    Attributes:
        options: all options, with their defaults.
    """

    options: ClassVar[dict[str, Any]]

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        if unknown := options.keys() - self.options.keys():
            raise TypeError(f"{type(self).__name__} has no {sorted(unknown)[0]!r}")
        super().__init__(params, {**self.options, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step: change the parameters and the state in place.

        Args:
            closure: function that evaluates the model again and returns the loss.
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

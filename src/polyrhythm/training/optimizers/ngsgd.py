"""SGD along the natural gradient of each layer, with a running estimate of its Fisher matrix.

Povey, Zhang, Khudanpur, "Parallel training of DNNs with natural gradient and parameter averaging", ICLR workshop 2015,
arXiv 1410.7455.

    p = A^-1 g B^-1,   p <- p |g| / |p|       g: a layer's gradient, (rows, columns)
    v <- m v + p
    w <- w - lr v

A and B are smoothed estimates of low rank (see `low_rank_fisher`) of the Fisher matrices of the layer's outputs and
inputs, made of the steps before; m is `momentum`. Departures: the paper estimates them from the derivatives of single
samples, which no optimizer sees; here rows and columns of the mean gradient stand in their place. Biases and other
parameters of one dimension stay as they are (the paper makes them a column of the layer). With rank = 0 both matrices
are multiples of the identity, and this is `sgd`, bit for bit. The estimates are each worker's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from polyrhythm.training.natural_gradient import Fisher, natural_gradient
from polyrhythm.training.optimizer import OptimizerConfig, ParameterwiseOptimizer
from polyrhythm.training.quantities import Count, Decay, InnerFraction, NonNegative, Positive

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn


class NaturalGradientSGD(ParameterwiseOptimizer):
    """NG-SGD by the module's rule: each parameter is a layer, with `rows` of its matrix (0: it is none)."""

    options: ClassVar = {
        "lr": 0.05,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "rows": 0,
        "rank": 20,
        "alpha": 4.0,
        "eta": 0.1,
        "update_every": 4,
    }

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        state = self.state[parameter]
        fisher = Fisher(group["rank"], group["alpha"], group["eta"], group["update_every"])
        direction = natural_gradient(gradient, group["rows"], state, fisher)
        if group["momentum"]:
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = direction.clone()
            else:
                state["momentum_buffer"].mul_(group["momentum"]).add_(direction)
            direction = state["momentum_buffer"]
        parameter.add_(direction, alpha=-group["lr"])


class NGSGD(OptimizerConfig):
    """Configuration of NG-SGD.

    Attributes:
        momentum: fraction of the momentum buffer that is kept at each step.
        rank: rank of the low-rank part of each Fisher matrix; 0: plain SGD.
        alpha: smoothing: multiple of the mean eigenvalue of a Fisher matrix that is added to each eigenvalue.
        eta: weight of the new estimate of a Fisher matrix at each update.
        update_every: steps between updates of the estimates, after the first ten.
    """

    kind: ClassVar = NaturalGradientSGD
    layerwise: ClassVar[bool] = True

    lr: Positive = 0.05
    momentum: Decay = 0.9
    rank: int = Field(default=20, ge=0)
    alpha: NonNegative = 4.0
    eta: InnerFraction = 0.1
    update_every: Count = 4

    def groups(self, parameters: Iterable[nn.Parameter]) -> list[Any]:
        """Return a group for each parameter, which knows the rows of it."""
        given = super().groups(parameters)
        groups = [group if isinstance(group, dict) else {"params": [group]} for group in given]
        return [
            {**group, "params": [each], "rows": len(each) if each.ndim > 1 else 0}
            for group in groups
            for each in group["params"]
        ]

"""Adagrad as Downpour's servers run it.

Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1; the method is that of J. Duchi, E. Hazan,
Y. Singer, "Adaptive subgradient methods for online learning and stochastic optimization", JMLR 12, 2011.

    s <- s + g^2
    w <- w - lr g / sqrt(s)          0 where s is 0

s starts at 0, and nothing is added to the root, so the first step of every number is lr exactly, up or down. PyTorch's
Adagrad adds 1e-10 to the root; TensorFlow's starts s at 0.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from polyrhythm.training.optimizer import OptimizerConfig, ParameterwiseOptimizer
from polyrhythm.training.quantities import Positive

if TYPE_CHECKING:
    from torch import Tensor


class DownpourAdagradOptimizer(ParameterwiseOptimizer):
    """Adagrad without an epsilon; the rule is this module's."""

    options: ClassVar = {"lr": 0.01, "weight_decay": 0.0}

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["sum"] = torch.zeros_like(parameter)
        if group["weight_decay"] != 0:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        root = state["sum"].addcmul_(gradient, gradient).sqrt()
        direction = torch.where(root > 0, gradient / root, torch.zeros_like(root))
        parameter.sub_(direction.mul_(group["lr"]))


class DownpourAdagrad(OptimizerConfig):
    """Keys of Adagrad without an epsilon."""

    kind: ClassVar = DownpourAdagradOptimizer

    lr: Positive = 0.01

"""Adagrad as Downpour's servers run it.

Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1; the method is that of J. Duchi, E. Hazan,
Y. Singer, "Adaptive subgradient methods for online learning and stochastic optimization", JMLR 12, 2011.

    s <- s + g^2
    w <- w - lr g / sqrt(s)          0 where s is 0

s starts at 0, and nothing is added to the root, so the first step of every number is lr exactly, up or down. PyTorch's
Adagrad adds 1e-10 to the root; TensorFlow's starts s at 0.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from polyrhythm.training.optimizer import OptimizerConfig, ParameterwiseOptimizer
from polyrhythm.training.quantities import Positive

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn


class DownpourAdagrad(OptimizerConfig):
    """Keys of Adagrad without an epsilon."""

    lr: Positive = 0.01

    def create(self, parameters: Iterable[nn.Parameter]) -> DownpourAdagradOptimizer:
        """Make `DownpourAdagradOptimizer`."""
        return DownpourAdagradOptimizer(parameters, lr=self.lr, weight_decay=self.weight_decay)


class DownpourAdagradOptimizer(ParameterwiseOptimizer):
    """Adagrad without an epsilon; the rule is this module's.

    Args:
        params: what to train, or groups of it, as for every `torch.optim` optimiser.
        lr: the learning rate.
        weight_decay: L2, added to the gradient.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float = 0.01,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["sum"] = torch.zeros_like(parameter)
        if group["weight_decay"] != 0:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        root = state["sum"].addcmul_(gradient, gradient).sqrt()
        direction = torch.where(root > 0, gradient / root, torch.zeros_like(root))
        parameter.sub_(direction.mul_(group["lr"]))

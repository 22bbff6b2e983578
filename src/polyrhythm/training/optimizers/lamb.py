"""LAMB: Adam with a step as long, in each layer, as a fixed share of its weights.

Y. You, J. Li, S. Reddi and others, "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR
2020, arXiv:1904.00962.

    m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
    q = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + e) + d w
    w <- w - lr (|w| / |q|) q              |w| / |q| is 1 where either is 0

|.| is the Euclidean norm of a layer (phi of the paper is the identity); b1 and b2 are `betas`, e is `eps`, d
`weight_decay`, t counts steps from 1. `bias_correction` off leaves the two divisions by 1 - b^t out, as Google's
TensorFlow code does. Parameters of one dimension (biases, batch norm) have no ratio, and do not decay without
`decay_vectors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from polyrhythm.training.optimizer import OptimizerConfig, ParameterwiseOptimizer
from polyrhythm.training.quantities import Decay, NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor


class LAMBOptimizer(ParameterwiseOptimizer):
    """LAMB by the module's rule: each parameter is a layer, and has the ratio if `adapt`."""

    options: ClassVar = {
        "lr": 0.01,
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.0,
        "bias_correction": True,
        "adapt": True,
    }

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        direction = self._direction(self.state[parameter], gradient, group)
        if group["weight_decay"]:
            direction.add_(parameter, alpha=group["weight_decay"])
        if group["adapt"]:
            weights, length = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(direction)
            direction.mul_(torch.where((weights > 0) & (length > 0), weights / length, 1.0))
        parameter.sub_(direction, alpha=group["lr"])

    def _direction(self, state: dict[str, Any], gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Return Adam's step at a learning rate of 1, as a tensor of its own."""
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(gradient)
            state["exp_avg_sq"] = torch.zeros_like(gradient)
        state["step"] += 1
        first, second = group["betas"]
        mean: Tensor = state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
        square: Tensor = state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        if not group["bias_correction"]:
            return mean / square.sqrt().add_(group["eps"])
        root = (square / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
        return mean.div(1 - first ** state["step"]).div_(root)


class LAMB(OptimizerConfig):
    """Keys of LAMB.

    Attributes:
        betas: shares of the running mean and of the running mean square that are kept at each step.
        eps: constant added to the root of the mean square.
        bias_correction: whether both means are freed of their start at 0.
    """

    kind: ClassVar = LAMBOptimizer
    layerwise: ClassVar[bool] = True
    for_vectors: ClassVar = {"adapt": False}

    lr: Positive = 0.01
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: NonNegative = 1e-6
    bias_correction: bool = True
    decay_vectors: bool = False

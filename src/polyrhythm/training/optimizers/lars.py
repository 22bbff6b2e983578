"""LARS: each layer's step is as long as a fixed share of its weights.

Y. You, I. Gitman, B. Ginsburg, "Large batch training of convolutional networks", 2017, arXiv:1708.03888.

    r = k |w| / (|g| + d |w| + e)          1 where |w| or |g| is 0
    v <- m v + lr r (g + d w)
    w <- w - v

|.| is the Euclidean norm of a layer; k is `trust`, d `weight_decay`, m `momentum`, e `eps`. The learning rate
is inside v, as in the paper. Parameters of one dimension (biases, batch norm) do not decay without
`decay_vectors`, and have r = k in place of the ratio, so that one rate suits all. That is a departure: the
paper's ratio for every parameter gives a bias that begins at zero r = 1, a thousand times any other layer's, in its
first step and next to nothing in the second; most codes give all of them r = 1, which is far too long a step for
networks without batch norm. The ratio is applied whether or not
there is weight decay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from polyrhythm.training.optimizer import OptimizerConfig, ParameterwiseOptimizer
from polyrhythm.training.quantities import Decay, NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor


class LARSOptimizer(ParameterwiseOptimizer):
    """LARS by the module's rule: each parameter is a layer, and has the ratio r if `adapt`, else r = k."""

    options: ClassVar = {
        "lr": 3.0,
        "momentum": 0.9,
        "trust": 0.001,
        "eps": 1e-9,
        "weight_decay": 0.0,
        "adapt": True,
    }

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        decay = group["weight_decay"]
        direction = gradient.add(parameter, alpha=decay) if decay else gradient.clone()
        if group["adapt"]:
            weights, slope = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(gradient)
            ratio = group["trust"] * weights / (slope + decay * weights + group["eps"])
            direction.mul_(torch.where((weights > 0) & (slope > 0), ratio, 1.0))
        else:
            direction.mul_(group["trust"])
        buffer = state["momentum_buffer"].mul_(group["momentum"]).add_(direction, alpha=group["lr"])
        parameter.sub_(buffer)


class LARS(OptimizerConfig):
    """Keys of LARS.

    Attributes:
        momentum: share of the buffer that is kept at each step.
        trust: a step's length over that of the layer's weights, at a learning rate of 1.
        eps: constant added to the gradient's norm.
    """

    kind: ClassVar = LARSOptimizer
    layerwise: ClassVar[bool] = True
    for_vectors: ClassVar = {"adapt": False}

    lr: Positive = 3.0
    momentum: Decay = 0.9
    trust: Positive = 0.001
    eps: NonNegative = 1e-9
    decay_vectors: bool = False

"""LARS: each layer's step is as long as a fixed share of its weights.

Y. You, I. Gitman, B. Ginsburg, "Large batch training of convolutional networks", 2017, arXiv:1708.03888.

    r = k |w| / (|g| + d |w| + e)          1 where |w| or |g| is 0
    v <- m v + lr r (g + d w)
    w <- w - v

|.| is the Euclidean norm of a layer; k is `trust`, d `weight_decay`, m `momentum`, e `eps`. The learning rate
stands inside v, as in the paper. Parameters of one dimension (biases, batch norm) do not decay unless
`decay_vectors` says so, and have r = k in place of the ratio, so that one rate suits all (a departure: most codes
give them r = 1, which is far too long a step for networks without batch norm). The ratio is applied whether or not
there is weight decay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from polyrhythm.training.optimizer import OptimizerConfig, ParameterwiseOptimizer, apart
from polyrhythm.training.quantities import Decay, NonNegative, Positive

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn


class LARS(OptimizerConfig):
    """Keys of LARS.

    Attributes:
        momentum: share of the buffer that is kept at each step.
        trust: a step's length over that of the layer's weights, at a learning rate of 1.
        eps: added to the gradient's norm.
    """

    layerwise: ClassVar[bool] = True

    lr: Positive = 3.0
    momentum: Decay = 0.9
    trust: Positive = 0.001
    eps: NonNegative = 1e-9
    decay_vectors: bool = False

    def create(self, parameters: Iterable[nn.Parameter]) -> LARSOptimizer:
        """Make `LARSOptimizer`, which does not adapt to parameters of one dimension."""
        of_vectors: dict[str, Any] = {"adapt": False}
        if not self.decay_vectors:
            of_vectors["weight_decay"] = 0.0
        options = self.model_dump(exclude={"decay_vectors"})
        return LARSOptimizer(apart(list(parameters), of_vectors), **options)


class LARSOptimizer(ParameterwiseOptimizer):
    """LARS; the rule is this module's.

    Args:
        params: what to train, or groups of it, as for every `torch.optim` optimiser; each parameter is a layer.
        lr: the learning rate.
        momentum: share of the buffer that is kept.
        trust: k of the rule.
        eps: e of the rule.
        weight_decay: d of the rule.
        adapt: whether layers have the ratio r; without, r is k.
    """

    def __init__(
        self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]], lr: float = 3.0, **options: Any
    ) -> None:
        keys = {"momentum": 0.9, "trust": 0.001, "eps": 1e-9, "weight_decay": 0.0, "adapt": True}
        if unknown := options.keys() - keys.keys():
            raise TypeError(f"LARSOptimizer has no {sorted(unknown)[0]!r}")
        super().__init__(params, {"lr": lr, **keys, **options})

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

"""RMSProp as TensorFlow 1 has it, and as BSC trained with it.

Sources: `tf.train.RMSPropOptimizer` of TensorFlow 1; its values from V. Campos, F. Sastre, M. Yagües, M.
Bellver, X. Giró-i-Nieto, J. Torres, "Distributed training strategies for a computer vision deep learning
algorithm on a distributed GPU cluster", ICCS 2017.

    v <- r v + (1 - r) g^2
    u <- m u + lr g / sqrt(v + e)
    w <- w - u

r is `decay`, m is `momentum`, e is `epsilon`; v starts at 1 and u at 0. PyTorch's RMSProp differs three
times: there v starts at 0, e is added to the root, and the learning rate stands outside u, which matters when
it changes. With e = 1 the divisor is nearly 1, so this is nearly SGD.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from polyrhythm.training.optimizer import OptimizerConfig, ParameterwiseOptimizer
from polyrhythm.training.quantities import Decay, Positive

if TYPE_CHECKING:
    from torch import Tensor


class TF1RMSPropOptimizer(ParameterwiseOptimizer):
    """TensorFlow 1's RMSProp; the rule is this module's, with the symbols of `TF1RMSProp`."""

    options: ClassVar = {"lr": 0.1, "decay": 0.9, "momentum": 0.0, "epsilon": 1.0, "weight_decay": 0.0}

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["square_avg"] = torch.ones_like(parameter)
            if group["momentum"] > 0:
                state["momentum_buffer"] = torch.zeros_like(parameter)
        if group["weight_decay"] != 0:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        decay, lr = group["decay"], group["lr"]
        mean_square = state["square_avg"].mul_(decay).addcmul_(gradient, gradient, value=1 - decay)
        root = mean_square.add(group["epsilon"]).sqrt_()
        if group["momentum"] > 0:
            state["momentum_buffer"].mul_(group["momentum"]).addcdiv_(gradient, root, value=lr)
            parameter.sub_(state["momentum_buffer"])
        else:
            parameter.addcdiv_(gradient, root, value=-lr)


class TF1RMSProp(OptimizerConfig):
    """Keys of TensorFlow 1's RMSProp.

    Attributes:
        decay: share of the running mean square that is kept at each step.
        momentum: share of the momentum buffer that is kept at each step.
        epsilon: number added inside the root.
    """

    kind: ClassVar = TF1RMSPropOptimizer

    lr: Positive = 0.1
    decay: Decay = 0.9
    momentum: Decay = 0.0
    epsilon: Positive = 1.0

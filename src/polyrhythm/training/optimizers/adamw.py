"""AdamW: Adam with a weight decay that is no part of the gradient.

Paper: I. Loshchilov, F. Hutter, "Decoupled weight decay regularization", ICLR 2019, arXiv 1711.05101.

    m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
    w <- (1 - lr d) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + e)

b1 and b2 are `betas`, e is `eps`, d `weight_decay`, t counts steps from 1. DiLoCo's inner optimizer in its paper.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from polyrhythm.training.optimizer import OptimizerConfig
from polyrhythm.training.quantities import Decay, NonNegative, Positive


class AdamW(OptimizerConfig):
    """Keys of AdamW.

    Attributes:
        betas: shares of the running mean and of the running mean square that are kept at each step.
        eps: constant added to the root of the mean square.
        weight_decay: share of a parameter that a step at a learning rate of 1 takes off.
    """

    kind: ClassVar = torch.optim.AdamW

    lr: Positive = 0.001
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.01

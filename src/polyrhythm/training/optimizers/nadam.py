"""NAdam: Adam with Nesterov's look ahead.

Paper: T. Dozat, "Incorporating Nesterov momentum into Adam", ICLR workshop 2016.

    m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2;   k_t = b1 (1 - 0.96^(t d) / 2);   K_t = k_1 ... k_t
    w <- w - lr (k_{t+1} m / (1 - K_{t+1}) + (1 - k_t) g / (1 - K_t)) / (sqrt(v / (1 - b2^t)) + e)

b1 and b2 are `betas`, e is `eps`, d is `momentum_decay`, t counts steps from 1.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from polyrhythm.training.optimizer import OptimizerConfig
from polyrhythm.training.quantities import Decay, NonNegative, Positive


class NAdam(OptimizerConfig):
    """Keys of NAdam.

    Attributes:
        betas: shares of the running mean and of the running mean square that are kept at each step.
        eps: constant added to the root of the mean square.
        momentum_decay: speed at which the momentum rises from half of its value to all of it.
    """

    kind: ClassVar = torch.optim.NAdam

    lr: Positive = 0.002
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: NonNegative = 1e-8
    momentum_decay: NonNegative = 0.004

"""Adam: momentum over the root of a running mean square, both freed of their start at 0.

Papers: D. Kingma, J. Ba, "Adam: a method for stochastic optimization", ICLR 2015, arXiv 1412.6980; AMSGrad:
S. Reddi, S. Kale, S. Kumar, "On the convergence of Adam and beyond", ICLR 2018, arXiv 1904.09237.

    m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
    w <- w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + e)

b1 and b2 are `betas`, e is `eps`, t counts steps from 1. `amsgrad` takes the largest v so far. Weight decay
is L2, as everywhere here, and not AdamW's.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from polyrhythm.training.optimizer import OptimizerConfig
from polyrhythm.training.quantities import Decay, NonNegative, Positive


class Adam(OptimizerConfig):
    """Keys of Adam.

    Attributes:
        betas: shares of the running mean and of the running mean square that are kept at each step.
        eps: constant added to the root of the mean square.
        amsgrad: divide by the largest mean square so far.
    """

    kind: ClassVar = torch.optim.Adam

    lr: Positive = 0.001
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: NonNegative = 1e-8
    amsgrad: bool = False

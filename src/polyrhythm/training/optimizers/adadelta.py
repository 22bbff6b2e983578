"""Adadelta: steps with units from a running mean of past steps.

Paper: M. Zeiler, "ADADELTA: an adaptive learning rate method", 2012, arXiv 1212.5701.

    s <- r s + (1 - r) g^2;   d = g sqrt(u + e) / sqrt(s + e)
    u <- r u + (1 - r) d^2
    w <- w - lr d

r is `rho`, e is `eps`; s and u start at 0. The paper has no learning rate: that is `lr` = 1.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from polyrhythm.training.optimizer import OptimizerConfig
from polyrhythm.training.quantities import Decay, Positive


class Adadelta(OptimizerConfig):
    """Keys of Adadelta.

    Attributes:
        rho: share of both running means that is kept at each step.
        eps: number added inside both roots; without it the first step would be 0.
    """

    kind: ClassVar = torch.optim.Adadelta

    lr: Positive = 1.0
    rho: Decay = 0.9
    eps: Positive = 1e-6

"""Adagrad: steps that shrink with all squared gradients so far.

Paper: J. Duchi, E. Hazan, Y. Singer, "Adaptive subgradient methods for online learning and stochastic
optimization", JMLR 12, 2011.

    s <- s + g^2
    w <- w - lr / (1 + t d) g / (sqrt(s) + e)

s starts at `initial_accumulator_value`; e is `eps`; d is `lr_decay`, and t counts steps from 0. The paper has
neither d nor a start of s.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from polyrhythm.training.optimizer import OptimizerConfig
from polyrhythm.training.quantities import NonNegative, Positive


class Adagrad(OptimizerConfig):
    """Keys of Adagrad.

    Attributes:
        lr_decay: decay of the learning rate itself, per step.
        initial_accumulator_value: initial sum of squares.
        eps: constant added to the root, against division by 0.
    """

    kind: ClassVar = torch.optim.Adagrad

    lr: Positive = 0.01
    lr_decay: NonNegative = 0.0
    initial_accumulator_value: NonNegative = 0.0
    eps: NonNegative = 1e-10

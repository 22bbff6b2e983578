"""RMSProp: gradients over the root of their running mean square, as PyTorch has it.

Sources: T. Tieleman, G. Hinton, Coursera "Neural networks for machine learning", lecture 6.5, 2012; the
centered form: A. Graves, "Generating sequences with recurrent neural networks", 2013, arXiv 1308.0850.

    v <- a v + (1 - a) g^2;   d = g / (sqrt(v) + e)
    u <- m u + d
    w <- w - lr u

a is `alpha`, e is `eps`, m is `momentum`; v and u start at 0. `centered` takes v - n^2 in place
of v, with n <- a n + (1 - a) g. TensorFlow's form is `tf1_rmsprop`: other numbers.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from polyrhythm.training.optimizer import OptimizerConfig
from polyrhythm.training.quantities import Decay, NonNegative, Positive


class RMSProp(OptimizerConfig):
    """Keys of RMSProp.

    Attributes:
        alpha: share of the running mean square that is kept at each step.
        eps: constant added to the root of the mean square.
        momentum: share of the momentum buffer that is kept at each step.
        centered: subtract the square of the running mean, that is, divide by a standard deviation.
    """

    kind: ClassVar = torch.optim.RMSprop

    lr: Positive = 0.001
    alpha: Decay = 0.99
    eps: NonNegative = 1e-8
    momentum: Decay = 0.0
    centered: bool = False

"""Stochastic gradient descent with momentum.

Papers: B. Polyak, "Some methods of speeding up the convergence of iteration methods", USSR Computational
Mathematics and Mathematical Physics, 1964; Nesterov's form as in I. Sutskever, J. Martens, G. Dahl, G.
Hinton, "On the importance of initialization and momentum in deep learning", ICML 2013.

    v <- m v + g
    w <- w - lr v                 nesterov:  w <- w - lr (g + m v)

m is `momentum`. Unlike the papers, which keep `v <- m v - lr g`, the learning rate stands outside the buffer,
so that nothing needs mending when it changes; the buffer starts as the first gradient.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from pydantic import model_validator

from polyrhythm.errors import RequestError
from polyrhythm.training.optimizer import OptimizerConfig
from polyrhythm.training.quantities import Decay, Positive


class SGD(OptimizerConfig):
    """Keys of SGD.

    Attributes:
        momentum: share of the buffer that is kept at each step.
        nesterov: look ahead along the buffer.
    """

    kind: ClassVar = torch.optim.SGD

    lr: Positive = 0.05
    momentum: Decay = 0.9
    nesterov: bool = False

    @model_validator(mode="after")
    def _look_ahead_needs_momentum(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise RequestError("optimizer sgd: nesterov=True needs a momentum above 0, such as momentum=0.9")
        return self

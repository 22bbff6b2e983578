"""What every optimiser's configuration has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from polyrhythm.specs import Config
from polyrhythm.training.quantities import NonNegative, Positive

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import nn


class OptimizerConfig(Config, ABC):
    """An optimiser's keys; `create` makes the optimiser.

    All of them make ordinary `torch.optim` objects that treat every element alone: one flat vector, any slice
    of it, and the separate tensors that it was made of come out the same, bit for bit. torch's `fused` form
    is never asked for: its vector body and scalar tail round differently, so that a result would depend on
    where in memory a number lies.

    Attributes:
        lr: the learning rate, before any schedule.
        weight_decay: L2: this times the parameter is added to the gradient, before anything else.
    """

    lr: Positive
    weight_decay: NonNegative = 0.0

    @abstractmethod
    def create(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Makes the optimiser of these parameters, which it changes in place at every step."""

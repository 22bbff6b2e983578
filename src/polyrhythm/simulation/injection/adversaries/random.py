"""Random: normal numbers instead of a gradient."""

from __future__ import annotations

from random import Random as Generator

import torch
from torch import Tensor

from polyrhythm.simulation.injection.adversary import Adversary, Attack
from polyrhythm.training.quantities import Positive

_BITS = 63


class Random(Adversary):
    """Send normal numbers instead of a gradient.

    Attributes:
        scale: standard deviation, in root mean squares of the gradient.
    """

    scale: Positive = 30.0

    def attack(self) -> Attack:
        return self._drawn

    def _drawn(self, gradient: Tensor, random: Generator) -> Tensor:
        generator = torch.Generator().manual_seed(random.getrandbits(_BITS))
        noise = torch.randn(gradient.shape, generator=generator).to(gradient)
        return noise * (self.scale * gradient.square().mean().sqrt())

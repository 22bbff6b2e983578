"""Sign flip: the gradient, turned around and made longer."""

from __future__ import annotations

from random import Random

from torch import Tensor

from polyrhythm.simulation.injection.adversary import Adversary, Attack
from polyrhythm.training.quantities import Positive


class SignFlip(Adversary):
    """Ascend the loss in place of descending.

    Attributes:
        scale: scale by which the gradient is longer.
    """

    scale: Positive = 10.0

    def attack(self) -> Attack:
        return self._flipped

    def _flipped(self, gradient: Tensor, random: Random) -> Tensor:
        return gradient * -self.scale

"""Not a number: a worker that is broken rather than malicious."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from polyrhythm.simulation.injection.adversary import Adversary, Attack


class NaN(Adversary):
    """Sends no numbers."""

    def attack(self) -> Attack:
        """Makes an attack."""
        return self._broken

    def _broken(self, gradient: Tensor, random: Random) -> Tensor:
        return torch.full_like(gradient, torch.nan)

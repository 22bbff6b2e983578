"""Not a number: a worker that is broken rather than malicious."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from polyrhythm.simulation.injection.adversary import Adversary, Attack


class NaN(Adversary):
    """Send NaN in place of every number."""

    def attack(self) -> Attack:
        return self._broken

    def _broken(self, gradient: Tensor, random: Random) -> Tensor:
        return torch.full_like(gradient, torch.nan)

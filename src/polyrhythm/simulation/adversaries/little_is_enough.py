"""A little is enough: a change that is lost among the honest gradients' own differences.

Baruch, Baruch, Goldberg, "A Little Is Enough: Circumventing Defenses for Distributed Learning", NeurIPS 2019,
arXiv 1902.06156.

    sent_k = mean_k - z * deviation_k        of honest gradients, for each coordinate k

z = z; for 24 attackers of 50 workers the paper's rule gives 1.4. Departure: there, the attackers estimate mean and
deviation from each other's gradients of the same step; here, each from its own of all steps so far, since it sends
before it could hear of others.
"""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from polyrhythm.simulation.adversary import Adversary, Attack
from polyrhythm.training.quantities import Positive


class LittleIsEnough(Adversary):
    """Pushes every number a little, in the direction against its mean.

    Attributes:
        z: by how many standard deviations.
    """

    z: Positive = 1.5

    def attack(self) -> Attack:
        """Makes an attack that has seen nothing yet."""
        return _Hidden(self.z)


class _Hidden:
    """Keeps the mean and the sum of squared differences of what it has seen, after Welford."""

    def __init__(self, z: float) -> None:
        self._z = z
        self._seen = 0
        self._mean = torch.zeros(())
        self._squares = torch.zeros(())

    def __call__(self, gradient: Tensor, random: Random) -> Tensor:
        self._seen += 1
        before = gradient - self._mean
        self._mean = self._mean + before / self._seen
        self._squares = self._squares + before * (gradient - self._mean)
        return self._mean - self._z * (self._squares / self._seen).sqrt()

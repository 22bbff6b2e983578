"""A little is enough: a change that is lost among the honest gradients' own differences.

Baruch, Baruch, Goldberg, "A Little Is Enough: Circumventing Defenses for Distributed Learning", NeurIPS 2019,
arXiv 1902.06156.

    sent_k = mean_k - z * deviation_k        of honest gradients, for each coordinate k

z = z; for 24 attackers of 50 workers the paper's rule gives 1.4. As in the paper, attackers that are allies take mean
and deviation of each other's gradients of the same step, and all send the same. Departure: one without allies takes
those of its own gradients of all steps so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import ClassVar

import torch
from torch import Tensor

from polyrhythm.simulation.injection.adversary import Adversary, Attack
from polyrhythm.training.quantities import Positive


class LittleIsEnough(Adversary):
    """Pushes every number a little, in the direction against its mean.

    Attributes:
        z: shift in standard deviations.
    """

    colludes: ClassVar[bool] = True

    z: Positive = 1.5

    def attack(self) -> Attack:
        return _hidden(self.z)

    def agree(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the mean less z deviations, coordinate by coordinate."""
        seen = torch.stack(list(gradients))
        return seen.mean(0) - self.z * seen.std(0, correction=0)


def _hidden(z: float) -> Attack:
    """Return an attack that keeps the mean and the sum of squared differences of what it has seen, after Welford."""
    seen, mean, squares = 0, torch.zeros(()), torch.zeros(())

    def attack(gradient: Tensor, random: Random) -> Tensor:
        nonlocal seen, mean, squares
        seen += 1
        before = gradient - mean
        mean = mean + before / seen
        squares = squares + before * (gradient - mean)
        return mean - z * (squares / seen).sqrt()

    return attack

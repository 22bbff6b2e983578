"""Impulse noise: dead and stuck pixels.

out = 0 with probability p/2, 1 with p/2, else x, for every number;    p = 0.03, 0.06, 0.09, 0.17, 0.27
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polyrhythm.evaluation.corruption import Corruption, uniform_like

if TYPE_CHECKING:
    from torch import Tensor

_SHARES = (0.03, 0.06, 0.09, 0.17, 0.27)


class ImpulseNoise(Corruption):
    """Numbers that are black or white whatever was there."""

    def spoil(self, images: Tensor, severity: int, generators: list[torch.Generator]) -> Tensor:
        """Sets numbers to black or white; see `Corruption.spoil`."""
        share, chance = _SHARES[severity - 1], uniform_like(images, generators)
        salted = torch.where(chance < share, 1.0, images)
        return torch.where(chance < share / 2, 0.0, salted)

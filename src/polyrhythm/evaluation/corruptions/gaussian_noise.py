"""Gaussian noise, as sensors have in the dark.

out = x + s n,    n ~ N(0, 1) for every number;    s = 0.08, 0.12, 0.18, 0.26, 0.38
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyrhythm.evaluation.corruption import Corruption, noise_like

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_DEVIATIONS = (0.08, 0.12, 0.18, 0.26, 0.38)


class GaussianNoise(Corruption):
    """Noise that is alike everywhere."""

    def spoil(self, images: Tensor, severity: int, generators: list[torch.Generator]) -> Tensor:
        """Adds noise; see `Corruption.spoil`."""
        return images + _DEVIATIONS[severity - 1] * noise_like(images, generators)

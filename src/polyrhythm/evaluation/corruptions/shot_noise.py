"""Shot noise: light comes in single photons.

out = k / c,    k ~ Poisson(c x) for every number;    c = 60, 25, 12, 5, 3 photons for white
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polyrhythm.evaluation.corruption import Corruption

if TYPE_CHECKING:
    from torch import Tensor

_PHOTONS = (60.0, 25.0, 12.0, 5.0, 3.0)


class ShotNoise(Corruption):
    """Noise that grows with the light."""

    def spoil(self, images: Tensor, severity: int, generators: list[torch.Generator]) -> Tensor:
        """Counts photons; see `Corruption.spoil`."""
        photons = _PHOTONS[severity - 1]
        light = images.clamp(0, 1) * photons
        counted = [torch.poisson(each, generator=own) for each, own in zip(light, generators, strict=True)]
        return torch.stack(counted) / photons

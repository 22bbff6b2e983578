"""Contrast: less of it.

out = m + c (x - m),    m the mean of the picture's channel;    c = 0.4, 0.3, 0.2, 0.1, 0.05
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyrhythm.evaluation.corruption import Corruption

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_KEPT = (0.4, 0.3, 0.2, 0.1, 0.05)


class Contrast(Corruption):
    """A picture in fog-like flatness."""

    def spoil(self, images: Tensor, severity: int, generators: list[torch.Generator]) -> Tensor:
        """Draws all tones towards their mean; see `Corruption.spoil`."""
        mean = images.mean((2, 3), keepdim=True)
        return mean + _KEPT[severity - 1] * (images - mean)

"""Pixelation: a picture that was too small.

out = nearest(x scaled to s of its sides);    s = 0.6, 0.5, 0.4, 0.3, 0.25
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.functional import interpolate

from polyrhythm.evaluation.corruption import Corruption

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_SHARES = (0.6, 0.5, 0.4, 0.3, 0.25)


class Pixelate(Corruption):
    """Large square pixels."""

    def spoil(self, images: Tensor, severity: int, generators: list[torch.Generator]) -> Tensor:
        """Averages over areas and enlarges again; see `Corruption.spoil`."""
        size = images.shape[2:]
        small = [max(1, round(side * _SHARES[severity - 1])) for side in size]
        return interpolate(interpolate(images, small, mode="area"), size, mode="nearest")

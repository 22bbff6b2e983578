"""Defocus: every point becomes a disc.

    out = x * disc of radius r / its area;    r = 3, 4, 6, 8, 10 pixels of 224

The disc's rim is soft by one pixel. Departure from ImageNet-C: no further smoothing of the disc.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import conv2d, pad

from polyrhythm.evaluation.corruption import Corruption, pixels

if TYPE_CHECKING:
    from torch import Tensor

_RADII = (3.0, 4.0, 6.0, 8.0, 10.0)


class DefocusBlur(Corruption):
    """A picture out of focus."""

    def spoil(self, images: Tensor, severity: int, generators: list[torch.Generator]) -> Tensor:
        """Blurs; see `Corruption.spoil`."""
        return blurred(images, _disc(pixels(_RADII[severity - 1], images)))


def blurred(images: Tensor, kernel: Tensor) -> Tensor:
    """Gives images (B, C, H, W) convolved with a kernel (k, k) of odd k; edges go on as they are."""
    channels, half = images.shape[1], kernel.shape[0] // 2
    weight = kernel.to(images.dtype).expand(channels, 1, *kernel.shape)
    return conv2d(pad(images, (half,) * 4, mode="replicate"), weight, groups=channels)


def _disc(radius: float) -> Tensor:
    half = ceil(radius)
    offsets = torch.arange(-half, half + 1).float()
    distance = (offsets[:, None].square() + offsets[None].square()).sqrt()
    disc = (radius + 0.5 - distance).clamp(0, 1)
    return disc / disc.sum()

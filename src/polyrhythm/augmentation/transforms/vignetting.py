"""Vignetting: images get darker toward their corners.

Paper: R. Wu, S. Yan, Y. Shan, Q. Dang, G. Sun, "Deep Image: Scaling up Image Recognition", 2015, arXiv:1501.02876,
section 4.1.

    out = black + (image - black) (1 - s clip((r - r0) / (1 - r0), 0, 1)^2)
    r0 ~ uniform[0, 0.8),    s ~ uniform[0, strength)

r is the distance from the center in half diagonals; r0 is the radius of the unchanged area, s the loss of light in the
corners. The paper has two variables with 1960 combinations and does not specify them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from pydantic import Field

from polyrhythm.augmentation.tones import BYTES, Tones
from polyrhythm.augmentation.warp import distances, half_diagonal
from polyrhythm.specs import Config

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.augmentation.draws import Draws

LARGEST_AREA = 0.8


class Vignetting(Config):
    """Random vignetting.

    Attributes:
        strength: the largest share of light that corners lose.
        probability: probability that an image is darkened.
    """

    strength: float = Field(default=0.6, ge=0, le=1)
    probability: float = Field(default=0.5, ge=0, le=1)

    def combinations(self, channels: int, side: int) -> int:
        """Return the number of radii that differ by a pixel, times the shades of white corners in bytes."""
        radii = 1 + math.floor(LARGEST_AREA * half_diagonal(side, side))
        return radii * (1 + math.floor(255 * self.strength))

    def __call__(self, images: Tensor, draws: Draws, tones: Tones) -> Tensor:
        chosen, area = draws.chance(self.probability), draws.uniform(0, LARGEST_AREA)
        loss = torch.where(chosen, draws.uniform(0, self.strength), 0.0)
        return vignette(images, area, loss, tones)


def vignette(images: Tensor, area: Tensor, loss: Tensor, tones: Tones = BYTES) -> Tensor:
    """Darken images (B, C, H, W), uint8 or float, toward their corners, in a new tensor.

    Args:
        images: unchanged images.
        area: (B,), distance from the center at which darkening begins, in half diagonals, below 1.
        loss: (B,), share of light that the corners lose; 0 leaves an image unchanged.
        tones: black in float images; in bytes it is 0.
    """
    if not bool((loss != 0).any()):
        return images
    where = (loss != 0).nonzero().squeeze(1)
    chosen = images.index_select(0, where.to(images.device))
    real = chosen.dtype if chosen.is_floating_point() else torch.float32
    height, width = chosen.shape[2:]
    radius = distances(height, width, real, chosen.device)
    start, most = (values[where].to(chosen.device, real)[:, None, None, None] for values in (area, loss))
    darkened = 1 - most * ((radius - start) / (1 - start)).clamp_(0, 1).square_()
    if not chosen.is_floating_point():
        light = chosen.to(real).mul_(darkened).round_().to(chosen.dtype)
    else:
        black, _ = tones.of(chosen)
        light = (chosen - black).mul_(darkened).add_(black)
    return images.index_copy(0, where.to(images.device), light)

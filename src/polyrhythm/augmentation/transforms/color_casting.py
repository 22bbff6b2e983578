"""Color casting: images under light of another color.

Paper: R. Wu, S. Yan, Y. Shan, Q. Dang, G. Sun, "Deep Image: Scaling up Image Recognition", 2015, arXiv:1501.02876,
section 4.1.

    out[c] = clip(image[c] + on[c] v[c]),    on[c] a fair coin,    v[c] ~ uniform{-strength, …, strength}

c is a channel; v counts in 255ths of the way from black to white. The paper's strength is 20 and it does not clip;
numbers beyond black or white would be no image, so here they are clipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import Field

from polyrhythm.augmentation.tones import BYTES, Tones
from polyrhythm.specs import Config

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.augmentation.draws import Draws


class ColorCasting(Config):
    """Random constants, added to whole channels of an image.

    Attributes:
        strength: the largest shift, in 255ths of the range from black to white.
        probability: probability that an image is changed. Then each channel is shifted with probability 1/2.
    """

    strength: int = Field(default=20, ge=0, le=255)
    probability: float = Field(default=1.0, ge=0, le=1)

    def combinations(self, channels: int, side: int) -> int:
        """Return the number of different non-zero shifts: 68,920 of three channels, as in the paper."""
        return int((2 * self.strength + 1) ** channels - 1)

    def __call__(self, images: Tensor, draws: Draws, tones: Tones) -> Tensor:
        chosen = draws.chance(self.probability)
        shifts = [
            torch.where(chosen & draws.chance(0.5), draws.integers(-self.strength, self.strength), 0)
            for _ in range(images.shape[1])
        ]
        return cast_color(images, torch.stack(shifts, 1), tones)


def cast_color(images: Tensor, shifts: Tensor, tones: Tones = BYTES) -> Tensor:
    """Shift the channels of images (B, C, H, W), uint8 or float, in a new tensor, and clip them to black and white.

    `shifts`, (B, C) integers, are in 255ths of the range from black to white.
    """
    moved = (shifts != 0).any(1)
    if not bool(moved.any()):
        return images
    if not images.is_floating_point():  # all of them, as no shift and no clipping leave bytes as they are
        steps = shifts.to(images.device, torch.int16)[:, :, None, None]
        return images.to(torch.int16).add_(steps).clamp_(0, 255).to(images.dtype)
    where = moved.nonzero().squeeze(1)
    chosen = images.index_select(0, where.to(images.device))
    black, white = tones.of(chosen)
    steps = shifts[where].to(chosen.device, chosen.dtype)[:, :, None, None] * ((white - black) / 255)
    return images.index_copy(0, where.to(images.device), (chosen + steps).clamp_(black, white))

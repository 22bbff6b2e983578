"""Color jitter: brightness, contrast, saturation and hue of every image change by factors of its own.

Paper: A. Howard, "Some improvements on deep convolutional neural network based image classification", 2013,
arXiv:1312.5402; the operations are torchvision's.

    brightness   b x                            b ~ uniform[1 - brightness, 1 + brightness)
    contrast     c x + (1 - c) mean(gray(x))    same c, s
    saturation   s x + (1 - s) gray(x)
    hue          the hue of x in HSV, turned by h ~ uniform[-hue, hue) of the circle

In this order, clipped to black and white after each; torchvision draws the order too. gray(x) = 0.2989 R + 0.587 G +
0.114 B. Images that are not in three colors have brightness and contrast only.
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

_GREY = (0.2989, 0.587, 0.114)


class ColorJitter(Config):
    """Random changes of color.

    Attributes:
        brightness: largest change of its factor from 1.
        contrast: largest change of its factor from 1.
        saturation: largest change of its factor from 1.
        hue: largest turn, as a share of the color circle.
        probability: probability that an image is changed.
    """

    brightness: float = Field(default=0.4, ge=0, le=1)
    contrast: float = Field(default=0.4, ge=0, le=1)
    saturation: float = Field(default=0.4, ge=0, le=1)
    hue: float = Field(default=0.1, ge=0, le=0.5)
    probability: float = Field(default=0.8, ge=0, le=1)

    def __call__(self, images: Tensor, draws: Draws, tones: Tones) -> Tensor:
        chosen = draws.chance(self.probability)
        factors = [
            draws.uniform(1 - most, 1 + most) for most in (self.brightness, self.contrast, self.saturation)
        ]
        changes = torch.stack([*factors, draws.uniform(-self.hue, self.hue)], 1)
        return jitter(
            images, torch.where(chosen[:, None], changes, torch.tensor([1.0, 1.0, 1.0, 0.0])), tones
        )


def jitter(images: Tensor, changes: Tensor, tones: Tones = BYTES) -> Tensor:
    """Change the colors of images (B, C, H, W), uint8 or float, in a new tensor.

    `changes` (B, 4) are the factors of brightness, contrast and saturation, and the turn of the hue.
    """
    where = (changes != torch.tensor([1.0, 1.0, 1.0, 0.0])).any(1).nonzero().squeeze(1)
    if len(where) == 0:
        return images
    place = where.to(images.device)
    chosen = images.index_select(0, place)
    x = tones.unit(chosen)
    brightness, contrast, saturation, hue = changes[where].to(x)[:, :, None, None, None].unbind(1)
    x = (x * brightness).clamp_(0, 1)
    colored = x.shape[1] == len(_GREY)
    mean = (_gray(x) if colored else x).mean((1, 2, 3), keepdim=True)
    x = (x * contrast + mean * (1 - contrast)).clamp_(0, 1)
    if colored:
        x = (x * saturation + _gray(x) * (1 - saturation)).clamp_(0, 1)
        if bool((hue != 0).any()):
            x = _turned(x, hue[:, :, :, 0])
    return images.index_copy(0, place, tones.restored(x, chosen))


def _gray(x: Tensor) -> Tensor:
    return (x * x.new_tensor(_GREY)[:, None, None]).sum(1, keepdim=True)


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """Turn the hue of RGB (B, 3, H, W) in [0, 1]; value and saturation of HSV stay."""
    largest, least = x.amax(1), x.amin(1)
    span = largest - least
    # The hue in sixths of the circle, and back: each channel is the value, less what its distance from the hue takes.
    red, green, blue = x.unbind(1)
    safe = torch.where(span > 0, span, 1.0)
    hue = torch.where(
        largest == red,
        (green - blue) / safe,
        torch.where(largest == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    hue = hue + 6 * turn
    channels = []
    for offset in (5.0, 3.0, 1.0):
        k = (hue + offset) % 6
        channels.append(largest - span * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, 1)

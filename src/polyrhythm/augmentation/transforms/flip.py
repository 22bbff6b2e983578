"""Random flip: every picture is mirrored, left to right or top to bottom, with a given probability.

Paper: A. Krizhevsky, I. Sutskever, G. Hinton, "ImageNet Classification with Deep Convolutional Neural
Networks", NIPS 2012.

    out[b, :, y, x] = image[b, :, y, W - 1 - x]  if u[b] < p  else  image[b, :, y, x],    u[b] ~ uniform[0, 1)

p is `probability`; `axis` chooses between x, as above, and y.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from polyrhythm.augmentation.tones import Tones
from polyrhythm.specs import Config

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.augmentation.draws import Draws

Axis = Literal["horizontal", "vertical"]


class Flip(Config):
    """Random flip.

    Attributes:
        probability: of a picture to be mirrored, from 0 (none) to 1 (all).
        axis: `horizontal` (left to right) or `vertical` (top to bottom).
    """

    probability: float = Field(default=0.5, ge=0, le=1)
    axis: Axis = "horizontal"

    def __call__(self, images: Tensor, draws: Draws, tones: Tones) -> Tensor:
        """Mirrors some of the images (B, C, H, W); the input is not changed."""
        return flip(images, draws.chance(self.probability), self.axis)


def flip(images: Tensor, mirrored: Tensor, axis: Axis = "horizontal") -> Tensor:
    """Mirrors the images (B, C, H, W) whose `mirrored` (B,) bool is true, in a new tensor."""
    where = mirrored.to(images.device).nonzero().squeeze(1)
    chosen = images.index_select(0, where).flip(-1 if axis == "horizontal" else -2)
    return images.index_copy(0, where, chosen)

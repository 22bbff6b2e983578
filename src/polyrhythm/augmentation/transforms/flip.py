"""Random flip: every image is mirrored, left to right or top to bottom, with a given probability.

Paper: A. Krizhevsky, I. Sutskever, G. Hinton, "ImageNet Classification with Deep Convolutional Neural
Networks", NIPS 2012.

    out[b, :, y, x] = image[b, :, y, W - 1 - x]  if u[b] < p  else  image[b, :, y, x],    u[b] ~ uniform[0, 1)

p is `probability`; `axis` chooses between x, as above, and y.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field

from polyrhythm.augmentation.tones import Tones
from polyrhythm.augmentation.warp import Movement, mirror

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.augmentation.draws import Draws

Axis = Literal["horizontal", "vertical"]
_DIMENSIONS = {"horizontal": -1, "vertical": -2}


class Flip(Movement):
    """Random flip.

    Attributes:
        probability: probability that an image is mirrored.
        axis: `horizontal` (left to right) or `vertical` (top to bottom).
    """

    probability: float = Field(default=0.5, ge=0, le=1)
    axis: Axis = "horizontal"

    def combinations(self, channels: int, side: int) -> int:
        """Return 2: an image and its mirror image."""
        return 2

    def __call__(self, images: Tensor, draws: Draws, tones: Tones) -> Tensor:
        return flip(images, draws.chance(self.probability), self.axis)

    def drawn(self, draws: Draws) -> Tensor:
        """Draw which samples to mirror, (B, 2): 1 for a mirrored axis, x or y."""
        axes = torch.tensor([self.axis == "horizontal", self.axis == "vertical"])
        return (draws.chance(self.probability)[:, None] & axes).float()

    def matrix(self, parameters: Tensor) -> Tensor:
        return torch.diag_embed(1 - 2 * parameters)

    def mirrored(self, parameters: Tensor) -> Tensor:
        return parameters != 0


def flip(images: Tensor, mirrored: Tensor, axis: Axis = "horizontal") -> Tensor:
    """Mirror those of the images (B, C, H, W) where `mirrored` (B,) bool is true, in a new tensor."""
    return mirror(images, mirrored, _DIMENSIONS[axis])

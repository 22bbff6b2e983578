"""Random horizontal flip: every image is mirrored left to right with a given probability.

Paper: A. Krizhevsky, I. Sutskever, G. Hinton, "ImageNet Classification with Deep Convolutional Neural
Networks", NIPS 2012.

    out[b, :, y, x] = image[b, :, y, W - 1 - x]  if u[b] < p  else  image[b, :, y, x],    u[b] ~ uniform[0, 1)

p is `probability`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import Field

from polyrhythm.specs import Config

if TYPE_CHECKING:
    from torch import Generator, Tensor


class Flip(Config):
    """Random horizontal flip.

    Attributes:
        probability: of an image to be mirrored, from 0 (none) to 1 (all).
    """

    probability: float = Field(default=0.5, ge=0, le=1)

    def __call__(self, images: Tensor, generator: Generator) -> Tensor:
        """Mirrors some of the images (B, C, H, W), drawn from `generator`; the input is not changed."""
        return flip(images, torch.rand(len(images), generator=generator) < self.probability)


def flip(images: Tensor, mirrored: Tensor) -> Tensor:
    """Mirrors the images (B, C, H, W) whose `mirrored` (B,) bool is true, left to right, in a new tensor."""
    return torch.where(mirrored[:, None, None, None], images.flip(-1), images)

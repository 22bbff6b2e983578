"""Lens distortion: the barrel and pincushion distortion of lenses.

Paper: R. Wu, S. Yan, Y. Shan, Q. Dang, G. Sun, "Deep Image: Scaling up Image Recognition", 2015, arXiv:1501.02876,
section 4.1.

    r_source = r (1 + k r^2),    k ~ uniform[-strength, strength)

r is the distance from the center in half diagonals, so that corners have r = 1. k > 0 is a barrel, k < 0 a pincushion.
The paper has 260 types and degrees and does not specify them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from polyrhythm.augmentation.warp import Warp, half_diagonal

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.augmentation.draws import Draws


class LensDistortion(Warp):
    """Random barrel and pincushion distortion.

    Attributes:
        strength: the largest |k|; below 1/3 a pincushion cannot fold the image over itself.
        probability: probability that an image is distorted.
        fill: pixels from outside the image.
    """

    strength: float = Field(default=0.2, ge=0, lt=1 / 3)

    def combinations(self, channels: int, side: int) -> int:
        """Return the number of degrees that differ by a pixel at the corners."""
        return 1 + math.floor(2 * self.strength * half_diagonal(side, side))

    def draw(self, draws: Draws) -> Tensor:
        """Draw k for every image, (B, 1)."""
        return draws.uniform(-self.strength, self.strength)[:, None]

    def source(self, points: Tensor, parameters: Tensor) -> Tensor:
        squares = points.real.square() + points.imag.square()
        return points * (1 + parameters[:, 0, None, None] / half_diagonal(*points.shape[1:]) ** 2 * squares)

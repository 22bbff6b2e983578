"""Lens distortion: pictures as barrel and pincushion lenses make them.

Paper: R. Wu, S. Yan, Y. Shan, Q. Dang, G. Sun, "Deep Image: Scaling up Image Recognition", 2015, arXiv:1501.02876,
section 3.3.

    r_source = r (1 + k r^2),    k ~ uniform[-strength, strength)

r is the distance from the centre in half diagonals, so that corners have r = 1. k > 0 draws the picture together as a
barrel, k < 0 spreads it as a pincushion. The paper has 260 types and degrees and does not name them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from polyrhythm.augmentation.warp import Warp, half_diagonal

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.augmentation.draws import Draws


class LensDistortion(Warp):
    """Random barrel and pincushion distortion.

    Attributes:
        strength: the largest k, either way; below 1/3 no pincushion folds the picture over itself.
        probability: of a picture to be distorted.
        fill: what comes in from outside.
    """

    strength: float = Field(default=0.2, ge=0, lt=1 / 3)

    def draw(self, draws: Draws) -> Tensor:
        """Draws every picture's k, (B, 1)."""
        return draws.uniform(-self.strength, self.strength)[:, None]

    def source(self, points: Tensor, parameters: Tensor) -> Tensor:
        """Moves the points along their radius; see `Movement.source`."""
        squares = points.real.square() + points.imag.square()
        return points * (1 + parameters[:, 0, None, None] / half_diagonal(*points.shape[1:]) ** 2 * squares)

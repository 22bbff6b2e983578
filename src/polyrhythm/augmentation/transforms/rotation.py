"""Rotation: every image is rotated about its center by an angle of its own.

Paper: R. Wu, S. Yan, Y. Shan, Q. Dang, G. Sun, "Deep Image: Scaling up Image Recognition", 2015, arXiv:1501.02876,
section 4.1.

    source(x, y) = (x cos a - y sin a, x sin a + y cos a),    a ~ uniform[-strength, strength)

A positive a rotates anticlockwise. The paper has 20 angles and does not specify them; here they are continuous.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from pydantic import Field

from polyrhythm.augmentation.warp import Warp, half_diagonal

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.augmentation.draws import Draws


class Rotation(Warp):
    """Random rotation.

    Attributes:
        strength: the largest angle, in degrees, in either direction.
        probability: probability that an image is rotated.
        fill: pixels that appear in the corners.
    """

    strength: float = Field(default=15.0, ge=0, le=180)

    def combinations(self, channels: int, side: int) -> int:
        """Return the number of angles that differ by a pixel at the corners."""
        return 1 + math.floor(2 * math.radians(self.strength) * half_diagonal(side, side))

    def draw(self, draws: Draws) -> Tensor:
        """Draw an angle for every image, (B, 1) in radians."""
        return torch.deg2rad(draws.uniform(-self.strength, self.strength))[:, None]

    def matrix(self, parameters: Tensor) -> Tensor:
        cos, sin = parameters[:, 0].cos(), parameters[:, 0].sin()
        return torch.stack((torch.stack((cos, -sin), 1), torch.stack((sin, cos), 1)), 1)

"""Stretching: the width and height of every image are scaled by factors of its own.

Paper: R. Wu, S. Yan, Y. Shan, Q. Dang, G. Sun, "Deep Image: Scaling up Image Recognition", 2015, arXiv:1501.02876,
section 4.1: horizontal and vertical stretching.

    source(x, y) = (x e^-u, y e^-v),    u, v ~ uniform[-ln(1 + strength), ln(1 + strength))

The paper counts both among its lens distortions and specifies no factors. A factor and its inverse are equally likely.
"""

from __future__ import annotations

from math import log1p
from typing import TYPE_CHECKING

import torch
from pydantic import Field

from polyrhythm.augmentation.warp import Warp

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.augmentation.draws import Draws


class Stretching(Warp):
    """Random horizontal and vertical stretching.

    Attributes:
        strength: the largest factor minus one: 0.2 makes sides up to 20 % longer, or a sixth shorter.
        probability: probability that an image is stretched.
        fill: pixels that appear where the image became smaller.
    """

    strength: float = Field(default=0.2, ge=0, le=3)

    def draw(self, draws: Draws) -> Tensor:
        """Draw the logarithms of every image's factors, (B, 2): for width and height."""
        most = log1p(self.strength)
        return torch.stack((draws.uniform(-most, most), draws.uniform(-most, most)), 1)

    def matrix(self, parameters: Tensor) -> Tensor:
        return torch.diag_embed(torch.exp(-parameters))

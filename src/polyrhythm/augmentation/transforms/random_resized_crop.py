"""Random resized crop: a random part of every image, of random area and shape, is scaled to the image's size.

Paper: C. Szegedy and others, "Going deeper with convolutions", CVPR 2015, arXiv:1409.4842, section 6.

    a ~ uniform[smallest, 1),    r = exp(u),  u ~ uniform[-ln(4/3), ln(4/3))
    w = min(1, sqrt(a r)),    h = min(1, sqrt(a / r))
    source(x, y) = (w x + p (1 - w) W / 2,  h y + q (1 - h) H / 2),    p, q ~ uniform[-1, 1)

`ratio` is 4/3. The paper's smallest area is 0.08, for a million images; few images want a larger one. A part that
is longer than the image is cut off at its sides, where others draw again.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

import torch
from pydantic import Field

from polyrhythm.augmentation.warp import Fill, Warp

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.augmentation.draws import Draws


class RandomResizedCrop(Warp):
    """Random parts of images, scaled to their size.

    Attributes:
        smallest: share of the image's area that a part has at least.
        ratio: largest width over height of a part, relative to the image's, and the inverse of the smallest.
        probability: probability that an image is cut.
        fill: pixels half a step outside the image.
    """

    smallest: float = Field(default=0.08, gt=0, le=1)
    ratio: float = Field(default=4 / 3, ge=1, le=10)
    fill: Fill = "border"

    def draw(self, draws: Draws) -> Tensor:
        """Draw (B, 4): one minus the shares of width and height, and the place, from -1 to 1 across and down."""
        area, shape = draws.uniform(self.smallest, 1), draws.uniform(-log(self.ratio), log(self.ratio)).exp()
        width, height = (area * shape).sqrt().clamp_max(1), (area / shape).sqrt().clamp_max(1)
        return torch.stack((1 - width, 1 - height, draws.uniform(-1, 1), draws.uniform(-1, 1)), 1)

    def source(self, points: Tensor, parameters: Tensor) -> Tensor:
        height, width = points.shape[1:]
        lost_x, lost_y, across, down = parameters[:, :, None, None].unbind(1)
        x = (1 - lost_x) * points.real + across * lost_x * width / 2
        y = (1 - lost_y) * points.imag + down * lost_y * height / 2
        return torch.complex(x, y)

"""Random erasing: a rectangle of some images is covered, so that a network does not rely on one part of them.

Paper: Z. Zhong, L. Zheng, G. Kang, S. Li, Y. Yang, "Random erasing data augmentation", AAAI 2020, arXiv:1708.04896.

    area ~ uniform[smallest, largest) of the image,    height/width = exp(u),  u ~ uniform[ln 0.3, ln 3.3)
    the place is uniform among those where the rectangle fits

A rectangle longer than the image is cut off; the paper draws again.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field

from polyrhythm.augmentation.tones import Tones
from polyrhythm.specs import Config

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.augmentation.draws import Draws

_SHAPES = (log(0.3), log(3.3))


class Erasing(Config):
    """Random rectangles that are covered.

    Attributes:
        probability: probability that an image has one.
        smallest: minimum share of the image's area.
        largest: largest share of the image's area.
        fill: `zero` (the mean color, as images are normalized), or `noise`, uniform from black to white.
    """

    probability: float = Field(default=0.5, ge=0, le=1)
    smallest: float = Field(default=0.02, gt=0, le=1)
    largest: float = Field(default=0.33, gt=0, le=1)
    fill: Literal["zero", "noise"] = "zero"

    def __call__(self, images: Tensor, draws: Draws, tones: Tones) -> Tensor:
        chosen, area = draws.chance(self.probability), draws.uniform(self.smallest, self.largest)
        shape, down, across = draws.uniform(*_SHAPES).exp(), draws.uniform(), draws.uniform()
        seeds = draws.integers(0, (1 << 31) - 1)
        where = chosen.nonzero().squeeze(1)
        if len(where) == 0:
            return images
        height, width = images.shape[2:]
        rows = (height * (area * shape).sqrt()).round().clamp(1, height)
        columns = (width * (area / shape).sqrt()).round().clamp(1, width)
        top, left = (down * (height - rows + 1)).floor(), (across * (width - columns + 1)).floor()
        y, x = torch.arange(height)[None, :, None], torch.arange(width)[None, None]
        edges = [each[where, None, None] for each in (top, top + rows, left, left + columns)]
        inside = ((y >= edges[0]) & (y < edges[1]) & (x >= edges[2]) & (x < edges[3]))[:, None].to(
            images.device
        )
        place = where.to(images.device)
        cover = images.new_zeros(())
        if self.fill == "noise":
            noise = [
                torch.rand(images.shape[1:], generator=torch.Generator().manual_seed(seed))
                for seed in seeds[where].tolist()
            ]
            cover = tones.restored(torch.stack(noise).to(images.device), images)
        return images.index_copy(0, place, torch.where(inside, cover, images.index_select(0, place)))

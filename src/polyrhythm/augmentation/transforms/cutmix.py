"""CutMix: a rectangle of an image shows the same place of another.

Paper: S. Yun, D. Han, S. Oh, S. Chun, J. Choe, Y. Yoo, "CutMix: regularization strategy to train strong classifiers
with localizable features", ICCV 2019, arXiv:1905.04899.

    sides of the rectangle: sqrt(1 - s) of the image's,    s ~ Beta(alpha, alpha)
    center: uniform in the image; the rectangle is clipped to the image, and s becomes its remaining share

Source of the mixed images: `augmentation.mixing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polyrhythm.augmentation.mixing import Mixing

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.augmentation.draws import Draws


class CutMix(Mixing):
    """Images with a rectangle of another.

    Attributes:
        alpha: parameter alpha of the distribution Beta(alpha, alpha) of shares.
        probability: probability that an image is mixed.
    """

    def mixed(self, images: Tensor, others: Tensor, shares: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        height, width = images.shape[2:]
        across, down = draws.uniform(0, width).floor(), draws.uniform(0, height).floor()
        half = (1 - shares).sqrt() / 2
        edges = [
            (center + sign * (half * side).floor()).clamp(0, side)
            for center, side in ((down, height), (across, width))
            for sign in (-1, 1)
        ]
        top, bottom, left, right = (edge[:, None, None] for edge in edges)
        y, x = torch.arange(height)[None, :, None], torch.arange(width)[None, None]
        inside = (y >= top) & (y < bottom) & (x >= left) & (x < right)
        kept = 1 - inside.double().mean((1, 2))
        return torch.where(inside[:, None].to(images.device), others, images), kept

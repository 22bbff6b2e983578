"""Mixup: an image shines through another.

Paper: H. Zhang, M. Cisse, Y. Dauphin, D. Lopez-Paz, "mixup: beyond empirical risk minimization", ICLR 2018,
arXiv:1710.09412.

    x = s x_i + (1 - s) x_j,    s ~ Beta(alpha, alpha)

alpha is 0.2, as in the paper for ImageNet; it has 1 for CIFAR. Source of the mixed images:
`augmentation.mixing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from polyrhythm.augmentation.mixing import Mixing

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.augmentation.draws import Draws


class MixUp(Mixing):
    """Weighted means of two images.

    Attributes:
        alpha: parameter alpha of the distribution Beta(alpha, alpha) of weights.
        probability: probability that an image is mixed.
    """

    alpha: float = Field(default=0.2, gt=0, le=100)

    def mixed(self, images: Tensor, others: Tensor, shares: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        share = shares.to(images)[:, None, None, None]
        # From the image outwards: a share of 1 keeps its bits.
        return images + (1 - share) * (others - images), shares

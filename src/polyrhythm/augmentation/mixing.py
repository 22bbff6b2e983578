"""Mixing: an image and another one become one, and so do their labels.

    (x, t) = m((x_i, y_i), (x_j, y_j), share),    t = share onehot(y_i) + (1 - share) onehot(y_j)

The loss of such targets is share times that of one label plus the rest times that of the other, for every loss that is
linear in its target. Usually j is drawn from i's batch, so that an image would become something else with other
workers; here it is drawn from all training images, as a function of seed, epoch and i, and so are its own changes.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch.nn.functional import one_hot

from polyrhythm.augmentation.draws import Draws
from polyrhythm.specs import Config

if TYPE_CHECKING:
    from torch import Tensor


class Mixing(Config):
    """A way to mix images.

    Attributes:
        alpha: parameter alpha of the distribution Beta(alpha, alpha) of shares: small ones leave most of one image.
        probability: probability that an image is mixed.
    """

    alpha: float = Field(default=1.0, gt=0, le=100)
    probability: float = Field(default=1.0, ge=0, le=1)

    @abstractmethod
    def mixed(self, images: Tensor, others: Tensor, shares: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Mix images with others, (B, C, H, W) float each, in a new tensor.

        Args:
            images: unchanged images.
            others: unchanged images to mix in.
            shares: (B,) float64, of each image in its mixture; 1 leaves it as it is.
            draws: further random numbers.

        Returns:
            The mixtures, and the shares (B,) that the images really have in them.
        """

    def shares(self, draws: Draws) -> Tensor:
        """Draw the share of each image in its mixture, (B,) float64; 1 where it is not mixed."""
        from scipy.special import betaincinv  # no other run pays for it

        chosen = draws.chance(self.probability)
        drawn = torch.from_numpy(betaincinv(self.alpha, self.alpha, draws.uniform().numpy()))
        return torch.where(chosen, drawn, 1.0)


@dataclass(frozen=True)
class Mixer:
    """Ways to mix the images of a data set; each image draws one of them.

    Attributes:
        kinds: one or more.
        classes: number of them.
    """

    kinds: tuple[Mixing, ...]
    classes: int

    def partners(self, keys: Tensor, count: int) -> Tensor:
        """Return which image, of `count`, each is mixed with, (B,) int64; `keys` (B,) int64 as for a `Chain`."""
        return Draws(keys).integers(0, count - 1)

    def __call__(
        self, images: Tensor, others: Tensor, labels: Tensor, other_labels: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Mix images with their partners.

        Args:
            images: (B, C, H, W) float, not changed.
            others: images of the partners, of the same shape.
            labels: (B,) int64.
            other_labels: labels of the partners, (B,) int64.
            keys: see `partners`.

        Returns:
            The mixtures, and what they show: (B, classes) float32, each row adding up to 1.
        """
        draws = Draws(keys)
        draws.uniform()  # the partner's
        kind = draws.integers(0, len(self.kinds) - 1)
        shares = torch.ones(len(keys), dtype=torch.float64)
        for number, each in enumerate(self.kinds):
            own = torch.where(kind == number, each.shares(draws), 1.0)
            images, kept = each.mixed(images, others, own, draws)
            shares = torch.where(kind == number, kept, shares)
        first, second = (one_hot(each, self.classes).double() for each in (labels, other_labels))
        return images, (shares[:, None] * first + (1 - shares[:, None]) * second).float()

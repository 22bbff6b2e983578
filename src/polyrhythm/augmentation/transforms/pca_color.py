"""PCA color: light of images changes along the directions in which colors of photographs vary most.

Paper: A. Krizhevsky, I. Sutskever, G. Hinton, "ImageNet classification with deep convolutional neural networks", NIPS
2012, section 4.1.

    out = clip(x + sum_k v_k e_k a_k),    a_k ~ N(0, strength^2)

e_k and v_k are the eigenvalues (of 0 to 1) and eigenvectors of ImageNet's colors, as published with fb.resnet.torch.
"""

from __future__ import annotations

from math import pi
from typing import TYPE_CHECKING

import torch
from pydantic import Field

from polyrhythm.augmentation.tones import Tones
from polyrhythm.errors import RequestError
from polyrhythm.specs import Config

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.augmentation.draws import Draws

_VALUES = (0.2175, 0.0188, 0.0045)
_VECTORS = ((-0.5675, 0.7192, 0.4009), (-0.5808, -0.0045, -0.8140), (-0.5836, -0.6948, 0.4203))
"""Rows are red, green and blue; columns are the eigenvectors."""


class PCAColor(Config):
    """Random changes of light.

    Attributes:
        strength: standard deviation of the shares of the eigenvalues.
    """

    strength: float = Field(default=0.1, ge=0, le=10)

    def __call__(self, images: Tensor, draws: Draws, tones: Tones) -> Tensor:
        if images.shape[1] != len(_VALUES):
            raise RequestError(
                f"pca_color needs images with three channels, not in {images.shape[1]}: leave it out"
            )
        shares = torch.stack([_normal(draws) for _ in _VALUES], 1) * self.strength
        if self.strength == 0:
            return images
        shift = (shares * torch.tensor(_VALUES, dtype=shares.dtype)) @ torch.tensor(
            _VECTORS, dtype=shares.dtype
        ).T
        x = tones.unit(images)
        return tones.restored(x + shift.to(x)[:, :, None, None], images)


def _normal(draws: Draws) -> Tensor:
    """Return (B,) standard normal numbers, from two uniform ones each (G. Box, M. Muller, 1958)."""
    radius = (-2 * (1 - draws.uniform()).log()).sqrt()
    return radius * (2 * pi * draws.uniform()).cos()

"""What every corruption has in common: five severities, and noise that belongs to a picture and not to its batch.

D. Hendrycks, T. Dietterich, "Benchmarking neural network robustness to common corruptions and perturbations", ICLR
2019, arXiv:1903.12261 (ImageNet-C), whose names and severities are kept. Lengths are shares of the shorter side here,
so that small pictures suffer as large ones do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from polyrhythm.augmentation.tones import Tones
from polyrhythm.data.seeding import seed_for
from polyrhythm.specs import Config

SEVERITIES = 5
REFERENCE_SIDE = 224
"""Pixels a side for which lengths were chosen."""


class Corruption(Config, ABC):
    """A corruption."""

    @abstractmethod
    def spoil(self, images: Tensor, severity: int, generators: list[torch.Generator]) -> Tensor:
        """Spoils pictures.

        Args:
            images: (B, C, H, W) float32, from 0 (black) to 1 (white); not changed.
            severity: 1 to 5.
            generators: one a picture.

        Returns:
            (B, C, H, W); numbers beyond black and white are clipped by the caller.
        """

    def __call__(self, images: Tensor, severity: int, indices: Tensor, tones: Tones) -> Tensor:
        """Spoils pictures of any tones.

        Args:
            images: (B, C, H, W) float; not changed.
            severity: 1 to 5.
            indices: (B,) int64, the pictures' numbers, of which each one's noise is a function.
            tones: what black and white are in them.
        """
        black, white = tones.of(images)
        generators = [
            torch.Generator().manual_seed(seed_for(self.name, severity, index)) for index in indices.tolist()
        ]
        unit = ((images - black) / (white - black)).float()
        spoiled = self.spoil(unit, severity, generators).clamp(0, 1)
        return (spoiled * (white - black) + black).to(images.dtype)


def noise_like(images: Tensor, generators: list[torch.Generator]) -> Tensor:
    """Gives standard normal numbers of the shape of images (B, C, H, W), each picture's from its own generator."""
    return torch.stack([torch.randn(images.shape[1:], generator=each) for each in generators])


def uniform_like(images: Tensor, generators: list[torch.Generator]) -> Tensor:
    """Gives numbers in [0, 1) of the shape of images (B, C, H, W), each picture's from its own generator."""
    return torch.stack([torch.rand(images.shape[1:], generator=each) for each in generators])


def pixels(length: float, images: Tensor) -> float:
    """Gives a length that was chosen for pictures of 224 pixels, in pixels of these (B, C, H, W)."""
    return length * min(images.shape[2:]) / REFERENCE_SIDE

"""Warps: augmentations that move pixels, each a map from where a pixel will be to where it is taken from.

    out[b, :, p] = image[b, :, map_1(map_2(… p))]       the last warp's map comes first

Warps that follow each other are put together into one map and the image is sampled once: quicker than one after the
other, and blurred once. A sample that no warp moves is not sampled at all, so no strength means the same bits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import grid_sample

from polyrhythm.augmentation.draws import Draws
from polyrhythm.augmentation.tones import Tones
from polyrhythm.specs import Config

Fill = Literal["zero", "reflect", "border"]
_PADDING = {"zero": "zeros", "reflect": "reflection", "border": "border"}


class Warp(Config):
    """An augmentation that moves pixels.

    Attributes:
        probability: of a sample to be moved.
        fill: what comes in from outside: `zero` (the mean colour, as images are normalised), `reflect` (the image
            mirrored) or `border` (its outermost pixels).
    """

    probability: float = Field(default=1.0, ge=0, le=1)
    fill: Fill = "zero"

    @abstractmethod
    def draw(self, draws: Draws) -> Tensor:
        """Draws the parameters of every sample, (B, k) float; all zeros leave a sample as it is."""

    @abstractmethod
    def source(self, points: Tensor, parameters: Tensor) -> Tensor:
        """Maps points of the new image to those of the old one that they show.

        Args:
            points: (B, H, W, 2), x to the right and y down, in pixels from the centre; not changed.
            parameters: (B, k) float, as drawn.

        Returns:
            (B, H, W, 2).
        """

    def __call__(self, images: Tensor, draws: Draws, tones: Tones) -> Tensor:
        """Moves the pixels of images (B, C, H, W) in a new tensor; see `warp`."""
        return warp(images, [(self, self.drawn(draws))], self.fill)

    def drawn(self, draws: Draws) -> Tensor:
        """Draws whether to move each sample, and how; (B, k) float, zeros where it stays."""
        moved = draws.chance(self.probability)
        return torch.where(moved[:, None], self.draw(draws), 0.0)


def warp(images: Tensor, steps: Sequence[tuple[Warp, Tensor]], fill: Fill = "zero") -> Tensor:
    """Applies warps after each other, with one sampling (bilinear).

    Args:
        images: (B, C, H, W), uint8 or float; not changed.
        steps: the warps in order, each with its parameters (B, k).
        fill: what comes in from outside.

    Returns:
        (B, C, H, W) of the same dtype, on the same device; bytes are rounded.
    """
    moved = torch.stack([(parameters != 0).any(1) for _, parameters in steps]).any(0)
    if not bool(moved.any()):
        return images
    where = moved.nonzero().squeeze(1)
    chosen = images.index_select(0, where.to(images.device))
    real = torch.float64 if chosen.dtype == torch.float64 else torch.float32
    points = pixel_points(chosen, real)
    for kind, parameters in reversed(steps):
        points = kind.source(points, parameters[where].to(chosen.device, real))
    sampled = sample(chosen.to(real), points, fill)
    if not chosen.is_floating_point():
        sampled = sampled.round_().clamp_(0, 255)
    sampled = sampled.to(chosen.dtype)
    return sampled if len(where) == len(images) else images.index_copy(0, where.to(images.device), sampled)


def pixel_points(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Gives the place of every pixel of images (B, C, H, W), as (B, H, W, 2): x and y in pixels from the centre."""
    height, width = images.shape[2:]
    y = torch.arange(height, dtype=dtype, device=images.device) - (height - 1) / 2
    x = torch.arange(width, dtype=dtype, device=images.device) - (width - 1) / 2
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)
    return grid.expand(len(images), height, width, 2)


def sample(images: Tensor, points: Tensor, fill: Fill) -> Tensor:
    """Gives what images (B, C, H, W) show at points (B, H', W', 2), in pixels from the centre, bilinearly."""
    height, width = images.shape[2:]
    half = points.new_tensor([max(width - 1, 1) / 2, max(height - 1, 1) / 2])
    return grid_sample(
        images, points / half, mode="bilinear", padding_mode=_PADDING[fill], align_corners=True
    )


def half_diagonal(points: Tensor) -> float:
    """Gives the distance of a corner from the centre, in pixels, of an image whose points (B, H, W, 2) these are."""
    height, width = points.shape[1:3]
    return float(max(((height - 1) ** 2 + (width - 1) ** 2) ** 0.5 / 2, 1.0))

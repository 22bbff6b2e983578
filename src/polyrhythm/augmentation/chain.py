"""Several augmentations after one another: their specs with `;` between, as in `crop(padding=2); flip`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Protocol, cast

import torch

from polyrhythm.augmentation.draws import Draws
from polyrhythm.augmentation.tones import UNIT, Tones
from polyrhythm.augmentation.warp import Warp, warp
from polyrhythm.specs import build

if TYPE_CHECKING:
    from torch import Tensor

TRANSFORMS = "polyrhythm.augmentation.transforms"
_TOGETHER_PIXELS = 1 << 18
"""Pixels of as many pictures as a CPU changes at once: what is computed on the way then stays in its caches."""


class Transform(Protocol):
    """Changes images at random: a pure function of the images and of each sample's own random numbers."""

    def __call__(self, images: Tensor, draws: Draws, tones: Tones, /) -> Tensor:
        """Gives the changed images, (B, C, H, W) as they came; the input is not changed."""


@dataclass(frozen=True)
class Chain:
    """Augmentations that are applied in order.

    Warps that follow each other with the same fill are put together and sample the images once.

    Attributes:
        transforms: the first to be applied first.
        tones: what black and white are in float images.
    """

    transforms: tuple[Transform, ...]
    tones: Tones = UNIT

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        """Applies all of them.

        Args:
            images: (B, C, H, W), uint8 or float, on any device; not changed.
            keys: (B,) int64 on the CPU. A sample's changes depend on its key and on nothing else of the batch.

        Returns:
            (B, C, H, W) of the same dtype.
        """
        together = max(1, _TOGETHER_PIXELS // max(1, images.shape[2] * images.shape[3]))
        if images.device.type != "cpu" or len(images) <= together:
            return self._changed(images, keys)
        parts = zip(images.split(together), keys.split(together), strict=True)
        return torch.cat([self._changed(*part) for part in parts])

    def _changed(self, images: Tensor, keys: Tensor) -> Tensor:
        draws = Draws(keys)
        for fill, group in groupby(self.transforms, _fill):
            if fill is None:
                for transform in group:
                    images = transform(images, draws, self.tones)
            else:
                warps = cast("Sequence[Warp]", tuple(group))
                images = warp(images, [(kind, kind.drawn(draws)) for kind in warps], warps[0].fill)
        return images

    def on(self, tones: Tones) -> Chain:
        """Gives the same chain for images of these tones."""
        return replace(self, tones=tones)

    def __str__(self) -> str:
        """Gives the text that builds this chain again."""
        return "; ".join(map(str, self.transforms))


def build_chain(specs: str) -> Chain | None:
    """Builds a chain from its specs with `;` between; `none` and an empty text mean no augmentation.

    Raises:
        RequestError: an unknown augmentation or key, or a value out of its range.
    """
    if specs.strip() in ("", "none"):
        return None
    transforms = (build("augmentation", spec, TRANSFORMS) for spec in specs.split(";"))
    return Chain(tuple(cast("Transform", transform) for transform in transforms))


def _fill(transform: Transform) -> str | None:
    """Tells warps by what they fill with; None for everything else."""
    return transform.fill if isinstance(transform, Warp) else None

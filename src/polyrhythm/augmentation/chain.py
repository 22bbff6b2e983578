"""Chains of augmentations: specs separated by `;`, as in `crop(padding=2); flip`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from polyrhythm.augmentation.draws import Draws
from polyrhythm.augmentation.mixing import Mixing
from polyrhythm.augmentation.tones import UNIT, Tones
from polyrhythm.augmentation.transforms.window import Window
from polyrhythm.augmentation.warp import Fill, Movement, Warp, warp
from polyrhythm.specs import build

TRANSFORMS = "polyrhythm.augmentation.transforms"
_TOGETHER_PIXELS = 1 << 18
"""Pixels of the images that a CPU changes at once, so that intermediate results stay in its caches."""


Transform = Movement | Callable[[Tensor, Draws, Tones], Tensor]
"""A random change of images: a movement of their pixels, or a pure function of images (B, C, H, W), each sample's own
random numbers, and black and white, which returns changed images of the same dtype."""


@runtime_checkable
class Counted(Protocol):
    """A random change with a number of visibly different results."""

    def combinations(self, channels: int, side: int) -> int:
        """Return the number of results of a square image; continuous changes differ by a pixel or a shade of a byte."""
        ...


@dataclass(frozen=True)
class Chain:
    """Augmentations that are applied in order; `tones` are black and white in float images.

    Consecutive movements with the same fill are composed, and the images are sampled once. Movements after a
    window sample the larger images around it. Mixings need other images and are applied by the caller.
    """

    transforms: tuple[Transform, ...]
    tones: Tones = UNIT
    mixings: tuple[Mixing, ...] = ()

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        """Apply all augmentations.

        Args:
            images: (B, C, H, W), uint8 or float, on any device; not changed.
            keys: (B,) int64 on the CPU. A sample's changes depend on its key and on nothing else in the batch.

        Returns:
            (B, C, H, W) with the dtype of `images`; a window changes H and W.
        """
        return self.changed(images, Draws(keys))

    def changed(self, images: Tensor, draws: Draws) -> Tensor:
        """Apply all augmentations with these draws, (B,) numbers at a time; see `__call__`."""
        # A GPU changes the whole batch at once; on a CPU the work is bound by the caches, so it goes in parts.
        together = max(1, _TOGETHER_PIXELS // max(1, images.shape[2] * images.shape[3]))
        if images.device.type != "cpu" or len(images) <= together:
            return self._changed(images, draws)
        parts = [slice(first, first + together) for first in range(0, len(images), together)]
        return torch.cat([self._changed(images[part], draws.of(part)) for part in parts])

    def _changed(self, images: Tensor, draws: Draws) -> Tensor:
        larger = None
        for group in _groups(self.transforms):
            if isinstance(group[0], Movement):
                steps = [(kind, kind.drawn(draws)) for kind in cast("list[Movement]", group)]
                images = warp(images, steps, next(iter(_fills(group)), "zero"), larger)
                larger = None
            elif isinstance(group[0], Window):
                places = group[0].drawn(images, draws)
                larger = (images, places)
                images = group[0].cut(images, places)
            else:
                images, larger = group[0](images, draws, self.tones), None
        return images

    def combinations(self, channels: int, side: int) -> list[tuple[str, int | None]]:
        """Return the name of each augmentation and the number of its results; None: they are not counted."""
        found: list[tuple[str, int | None]] = []
        for each in (*self.transforms, *self.mixings):
            name = str(each).partition("(")[0]
            found.append((name, each.combinations(channels, side) if isinstance(each, Counted) else None))
            side = each.size if isinstance(each, Window) else side
        return found

    def on(self, tones: Tones) -> Chain:
        """Return the same chain for images with these tones."""
        return replace(self, tones=tones)

    def __str__(self) -> str:
        """Return the specs that `build_chain` turns into this chain."""
        return "; ".join(map(str, (*self.transforms, *self.mixings)))


def build_chain(specs: str) -> Chain | None:
    """Build a chain from specs separated by `;`; return None for `none` and for an empty text.

    Raises:
        RequestError: unknown augmentation or key, or a value out of range.
    """
    if specs.strip() in ("", "none"):
        return None
    made = [build("augmentation", spec, TRANSFORMS) for spec in specs.split(";")]
    return Chain(
        tuple(cast("Transform", each) for each in made if not isinstance(each, Mixing)),
        mixings=tuple(each for each in made if isinstance(each, Mixing)),
    )


def _groups(transforms: Sequence[Transform]) -> list[list[Transform]]:
    """Group consecutive movements that have the same fill; every other transform is a group of its own."""
    groups: list[list[Transform]] = []
    for transform in transforms:
        if groups and _can_be_one([*groups[-1], transform]):
            groups[-1].append(transform)
        else:
            groups.append([transform])
    return groups


def _can_be_one(transforms: Sequence[Transform]) -> bool:
    return all(isinstance(each, Movement) for each in transforms) and len(_fills(transforms)) <= 1


def _fills(transforms: Sequence[Transform]) -> set[Fill]:
    return {each.fill for each in transforms if isinstance(each, Warp)}

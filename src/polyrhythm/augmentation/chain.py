"""Several augmentations after one another: their specs with `;` between, as in `crop(padding=2); flip`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from polyrhythm.specs import build

if TYPE_CHECKING:
    from torch import Generator, Tensor

TRANSFORMS = "polyrhythm.augmentation.transforms"


class Transform(Protocol):
    """Changes images at random: a pure function of the images and the state of the generator."""

    def __call__(self, images: Tensor, generator: Generator, /) -> Tensor:
        """Gives the changed images, (B, C, H, W) as they came; the input is not changed."""


@dataclass(frozen=True)
class Chain:
    """Augmentations that are applied in order, each drawing from the same generator.

    Attributes:
        transforms: the first to be applied first.
    """

    transforms: tuple[Transform, ...]

    def __call__(self, images: Tensor, generator: Generator) -> Tensor:
        """Applies all of them to images (B, C, H, W); the input is not changed."""
        for transform in self.transforms:
            images = transform(images, generator)
        return images

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

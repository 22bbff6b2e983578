"""A data set whose images are scaled to another size, for models that need larger ones than it has."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch.nn.functional import interpolate

from polyrhythm.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.data.dataset import Dataset, Split


@runtime_checkable
class HasWhole(Protocol):
    """A split that can read its images at other sizes, and beyond the square that it shows."""

    def whole(self, indices: Tensor, shorter_side: int) -> list[Tensor]:
        """Gives whole images; see `whole_pictures`."""


class ResizedSplit:
    """A split whose images are scaled to squares (bilinear, antialiased), a batch at a time."""

    def __init__(self, split: Split, image_size: int) -> None:
        self._split = split
        self._size = image_size

    def __len__(self) -> int:
        return len(self._split)

    @property
    def labels(self) -> Tensor:
        """The classes of all images, (n,) int64."""
        return self._split.labels

    def images(self, indices: Tensor) -> Tensor:
        """Gives the images of `indices`, (B,) int64, as (B, C, size, size) float32."""
        return scaled(self._split.images(indices), self._size)

    def whole(self, indices: Tensor, shorter_side: int) -> list[Tensor]:
        """Gives the whole images of `indices`; see `whole_pictures`."""
        return whole_pictures(self._split, indices, shorter_side)


def scaled(images: Tensor, side: int) -> Tensor:
    """Gives images (B, C, H, W) as (B, C, side, side), bilinear and antialiased; as they are if they are so already."""
    if images.shape[2:] == (side, side):
        return images
    if len(images) == 0:
        return images.new_empty(0, images.shape[1], side, side)
    return interpolate(images, (side, side), mode="bilinear", antialias=True)


def whole_pictures(split: Split, indices: Tensor, shorter_side: int) -> list[Tensor]:
    """Gives whole images, each scaled so that its shorter side has so many pixels (bilinear, antialiased).

    Args:
        split: one that knows more of an image than it shows has `whole(indices, shorter_side)`.
        indices: (B,) int64.
        shorter_side: in pixels.

    Returns:
        (C, H, W) each, float32; they may differ in shape.
    """
    if isinstance(split, HasWhole):
        return split.whole(indices, shorter_side)
    images = split.images(indices)
    height, width = images.shape[2:]
    scale = shorter_side / min(height, width)
    size = (max(shorter_side, round(height * scale)), max(shorter_side, round(width * scale)))
    if size != (height, width):
        images = interpolate(images, size, mode="bilinear", antialias=True)
    return list(images)


def resized(dataset: Dataset, image_size: int) -> Dataset:
    """Gives the same data set with images of `image_size` by `image_size` pixels.

    Raises:
        RequestError: a size below one.
    """
    if image_size < 1:
        raise RequestError(f"image size {image_size} is too small: give at least 1 pixel")
    channels, *size = dataset.image_shape
    if size == [image_size, image_size]:
        return dataset
    train, test = (ResizedSplit(split, image_size) for split in (dataset.train, dataset.test))
    return replace(dataset, train=train, test=test, image_shape=(channels, image_size, image_size))

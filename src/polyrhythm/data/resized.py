"""Images at other sizes: images that are scaled, and windows that are cut out of larger ones.

Training uses a random window, everything else the one in the center.

    image ── decode once, center square scaled to the scale ─▶ scale by scale ─▶ a window of the network's size

R. Wu and others, "Deep Image", 2015, arXiv:1501.02876, sections 4.1 and 4.2: images of 256 and of 512
pixels, and windows of 224 inside. The square is decoded to the same bytes in every epoch, so a cache may hold
it; the position of the window is an augmentation like others (`augmentation.transforms.window`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch.nn.functional import interpolate

from polyrhythm.data.shards import Streamed
from polyrhythm.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.data.dataset import Dataset, Split


@runtime_checkable
class HasWhole(Protocol):
    """A split that can read its images at other sizes, beyond the square that `images` returns."""

    def whole(self, indices: Tensor, shorter_side: int) -> list[Tensor]:
        """Return whole images; see `whole_pictures`."""


class ResizedSplit:
    """A split with images scaled to squares (bilinear, antialiased), one batch at a time."""

    def __init__(self, split: Split, image_size: int) -> None:
        self.larger = split
        self.labels = split.labels
        self.size = image_size

    def __len__(self) -> int:
        return len(self.larger)

    def images(self, indices: Tensor) -> Tensor:
        """Return the images of `indices`, (B,) int64, as (B, C, size, size) float32."""
        return scaled(self.larger.images(indices), self.size)

    def whole(self, indices: Tensor, shorter_side: int) -> list[Tensor]:
        """Return the whole images of `indices`; see `whole_pictures`."""
        return whole_pictures(self.larger, indices, shorter_side)


def scaled(images: Tensor, side: int) -> Tensor:
    """Scale images (B, C, H, W) to (B, C, side, side), bilinear and antialiased; unchanged if they have that size."""
    if images.shape[2:] == (side, side):
        return images
    if len(images) == 0:
        return images.new_empty(0, images.shape[1], side, side)
    return interpolate(images, (side, side), mode="bilinear", antialias=True)


def whole_pictures(split: Split, indices: Tensor, shorter_side: int) -> list[Tensor]:
    """Return whole images (C, H, W), each scaled to `shorter_side` pixels on its shorter side (bilinear).

    A split with a method `whole` reads them itself; of others the images are scaled.
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
    """Return the same data set with square images; raise `RequestError` for a size below one."""
    if image_size < 1:
        raise RequestError(f"image size {image_size} is too small: give at least 1 pixel")
    channels, *size = dataset.image_shape
    if size == [image_size, image_size]:
        return dataset
    train, test = (ResizedSplit(split, image_size) for split in (dataset.train, dataset.test))
    return replace(dataset, train=train, test=test, image_shape=(channels, image_size, image_size))


@runtime_checkable
class Uncut(Protocol):
    """A split of windows that can also return the larger images, for a transform to cut."""

    def uncut(self, indices: Tensor) -> Tensor:
        """Return the larger images of `indices`, (B,) int64, as (B, C, scale, scale) float32, normalized."""


class WindowSplit:
    """The centers, `image_size` pixels a side, of the images of another split."""

    def __init__(self, split: Split, image_size: int) -> None:
        self.larger = split
        self.labels = split.labels
        self.size = image_size

    def __len__(self) -> int:
        return len(self.larger)

    def images(self, indices: Tensor) -> Tensor:
        """Return the centers of the images of `indices`, (B,) int64, as (B, C, size, size) float32, normalized."""
        return middle(self.uncut(indices), self.size)

    def uncut(self, indices: Tensor) -> Tensor:
        """Return the larger images of `indices`; see `Uncut.uncut`."""
        return self.larger.images(indices)

    def whole(self, indices: Tensor, shorter_side: int) -> list[Tensor]:
        """Return the whole images of `indices`; see `whole_pictures`."""
        return whole_pictures(self.larger, indices, shorter_side)

    def over(self, larger: Split) -> WindowSplit:
        """Return the same windows of another split, such as a cache of the larger images."""
        return _windows(larger, self.size)


class StreamedWindowSplit(WindowSplit):
    """The same over a split with a preferred order of reading; see `Streamed`."""

    def order(self, epoch: int, seed: int, workers: int) -> Tensor:
        """Return an epoch's order; see `Streamed.order`."""
        assert isinstance(self.larger, Streamed)
        return self.larger.order(epoch, seed, workers)

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return those of `indices` that can be read, and their larger images."""
        assert isinstance(self.larger, Streamed)
        return self.larger.read(indices)


def middle(images: Tensor, image_size: int) -> Tensor:
    """Return the center (…, size, size) of images (…, H, W), which are not smaller; a view."""
    height, width = images.shape[-2:]
    top, left = (height - image_size) // 2, (width - image_size) // 2
    return images[..., top : top + image_size, left : left + image_size]


def windowed(dataset: Dataset, image_size: int) -> Dataset:
    """Return a data set of windows of square images; raise `RequestError` if they do not fit."""
    channels, scale, _ = dataset.image_shape
    if not 1 <= image_size <= scale:
        raise RequestError(
            f"windows of {image_size} pixels cannot be cut out of images of scale {scale}: give a --scale of "
            f"{image_size} or more, or a smaller --image-size"
        )
    train, test = (_windows(split, image_size) for split in (dataset.train, dataset.test))
    shape = (channels, image_size, image_size)
    return replace(dataset, train=train, test=test, image_shape=shape, shown=image_size / scale)


def _windows(split: Split, image_size: int) -> WindowSplit:
    kind = StreamedWindowSplit if isinstance(split, Streamed) else WindowSplit
    return kind(split, image_size)

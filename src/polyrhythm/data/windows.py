"""Windows of larger pictures: training sees one at random, everything else the one in the middle.

    picture ─ decode once, centre square scaled to the scale ─▶ scale by scale ─▶ a window of the network's size

R. Wu and others, "Deep Image", 2015, arXiv:1501.02876, sections 3.2 and 3.3: pictures of 256 and of 512 pixels, and
windows of 224 inside. The square is decoded to the same bytes in every epoch, so a cache may hold it; where the window
lies is a random change like others (`augmentation.transforms.window`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from polyrhythm.data.resized import whole_pictures
from polyrhythm.data.shards.shard_split import Streamed
from polyrhythm.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.data.dataset import Dataset, Split


@runtime_checkable
class Uncut(Protocol):
    """A split that shows windows of larger images, and can give these whole for a transform to cut."""

    def uncut(self, indices: Tensor) -> Tensor:
        """Gives the larger images of `indices`, (B,) int64, as (B, C, scale, scale) float32, normalised."""


class WindowSplit:
    """A split that shows the middle of another one's images.

    Args:
        split: of images that are larger.
        image_size: pixels a side of what is shown.
    """

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
        """Gives the middles of the images of `indices`, (B,) int64, as (B, C, size, size) float32, normalised."""
        return middle(self.uncut(indices), self._size)

    def uncut(self, indices: Tensor) -> Tensor:
        """Gives the larger images of `indices`; see `Uncut.uncut`."""
        return self._split.images(indices)

    def whole(self, indices: Tensor, shorter_side: int) -> list[Tensor]:
        """Gives the whole images of `indices`; see `whole_pictures`."""
        return whole_pictures(self._split, indices, shorter_side)

    @property
    def larger(self) -> Split:
        """The split of the larger images."""
        return self._split

    def over(self, larger: Split) -> WindowSplit:
        """Gives the same windows of another split, such as a cache of the larger images."""
        return _windows(larger, self._size)


class StreamedWindowSplit(WindowSplit):
    """The same over a split that says in which order it is best read; see `Streamed`."""

    def order(self, epoch: int, seed: int, workers: int) -> Tensor:
        """Gives an epoch's order; see `Streamed.order`."""
        assert isinstance(self._split, Streamed)
        return self._split.order(epoch, seed, workers)

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Gives those of `indices` that can be read, and their images uncut."""
        assert isinstance(self._split, Streamed)
        return self._split.read(indices)


def middle(images: Tensor, image_size: int) -> Tensor:
    """Gives the middle (…, size, size) of images (…, H, W), which are not smaller; a view."""
    height, width = images.shape[-2:]
    top, left = (height - image_size) // 2, (width - image_size) // 2
    return images[..., top : top + image_size, left : left + image_size]


def windowed(dataset: Dataset, image_size: int) -> Dataset:
    """Gives a data set of square images as one of windows of them.

    Raises:
        RequestError: windows are larger than the images, or less than a pixel.
    """
    channels, scale, _ = dataset.image_shape
    if not 1 <= image_size <= scale:
        raise RequestError(
            f"windows of {image_size} pixels cannot be cut out of pictures of scale {scale}: give a --scale of "
            f"{image_size} or more, or a smaller --image-size"
        )
    train, test = (_windows(split, image_size) for split in (dataset.train, dataset.test))
    shape = (channels, image_size, image_size)
    return replace(dataset, train=train, test=test, image_shape=shape, shown=image_size / scale)


def _windows(split: Split, image_size: int) -> WindowSplit:
    kind = StreamedWindowSplit if isinstance(split, Streamed) else WindowSplit
    return kind(split, image_size)

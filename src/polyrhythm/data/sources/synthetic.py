"""Synthetic images: noise added to one pattern per class, in any size and number, generated on access.

For measuring speed without a disk, and for dry runs and simulations without data. An image depends only on its index.
Accuracies on these images do not carry over to real ones.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from polyrhythm.data.dataset import Dataset
from polyrhythm.data.seeding import generator_for
from polyrhythm.specs import Config


class Synthetic(Config):
    """Generated images.

    Attributes:
        classes: number of classes; image i is of class i mod `classes`.
        size: height and width of an image in pixels.
        channels: number of channels of an image.
        train: number of training images.
        test: number of test images.
    """

    classes: int = Field(default=1000, ge=2)
    size: int = Field(default=224, ge=1)
    channels: int = Field(default=3, ge=1)
    train: int = Field(default=10_000, ge=1)
    test: int = Field(default=1_000, ge=1)

    def load(self) -> Dataset:
        """Return the data set; images are generated on access."""
        shape = self.channels, self.size, self.size
        names = tuple(f"class {number}" for number in range(self.classes))
        train = SyntheticSplit(self.train, self.classes, shape, "train")
        return Dataset(
            "synthetic", train, SyntheticSplit(self.test, self.classes, shape, "test"), names, shape, 1
        )


class SyntheticSplit:
    """One split of the generated images.

    Args:
        count: number of images.
        classes: number of classes.
        shape: shape of an image, (C, H, W).
        part: name of the split, part of the seed.
    """

    def __init__(self, count: int, classes: int, shape: tuple[int, int, int], part: str) -> None:
        self.labels = torch.arange(count) % classes
        self._shape = shape
        self._part = part

    def __len__(self) -> int:
        return len(self.labels)

    def images(self, indices: Tensor) -> Tensor:
        """Return the images of `indices`, (B,) int64, as (B, C, H, W) float32 of mean 0 and variance 1.25."""
        found = torch.empty(len(indices), *self._shape)
        for image, index in zip(found, indices.tolist(), strict=True):
            image.normal_(generator=generator_for(f"synthetic picture, {self._part}", index))
            label = int(self.labels[index])
            pattern = torch.empty(self._shape)
            image += pattern.normal_(0.0, 0.5, generator=generator_for("synthetic class", label))
        return found

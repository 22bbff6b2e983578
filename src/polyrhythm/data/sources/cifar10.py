"""CIFAR-10: 50,000 + 10,000 photographs of 10 classes, 32 by 32 pixels in color.

Report: A. Krizhevsky, "Learning multiple layers of features from tiny images", University of Toronto, 2009.
"""

from __future__ import annotations

from pathlib import Path

import torch

from polyrhythm.data.dataset import Dataset
from polyrhythm.data.published import (
    Labelled,
    Origin,
    content_of,
    dataset_of,
    folder_of,
    found_in,
    records,
)
from polyrhythm.specs import Config

SHAPE = (3, 32, 32)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_PARTS = (tuple(f"data_batch_{number}" for number in range(1, 6)), ("test_batch",))
ORIGIN = Origin(
    (("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
    tuple(f"{name}.bin" for part in _PARTS for name in part),
)


class CIFAR10(Config):
    """Its binary version, `data_batch_1.bin` and others.

    Attributes:
        folder: folder with the files, at any depth; None: they are downloaded.
    """

    folder: str | None = None

    def load(self) -> Dataset:
        """Return the data; raise `RequestError` if a file is missing or damaged."""
        root = folder_of(self.folder, "cifar10", ORIGIN)
        train, test = (_joined([part_of_cifar(root, "cifar10", name) for name in names]) for names in _PARTS)
        return dataset_of("cifar10", train, test, CLASSES, 20)


def _joined(parts: list[Labelled]) -> Labelled:
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


def part_of_cifar(root: Path, what: str, name: str, label_bytes: int = 1) -> Labelled:
    """Return the images and labels of one of CIFAR's files; the last of its label bytes is the label."""
    path = found_in(root, what, f"{name}.bin")
    images, labels = records(content_of(path), path, label_bytes, SHAPE)
    return images, labels[:, -1]

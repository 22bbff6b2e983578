"""CIFAR-10: 50,000 + 10,000 photographs of 10 classes, 32 by 32 pixels in colour.

Report: A. Krizhevsky, "Learning multiple layers of features from tiny images", University of Toronto, 2009.
"""

from __future__ import annotations

import torch

from polyrhythm.data.dataset import Dataset
from polyrhythm.data.published import Labelled, content_of, dataset_of, found_in, records
from polyrhythm.specs import Config

SHAPE = (3, 32, 32)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_PARTS = (tuple(f"data_batch_{number}" for number in range(1, 6)), ("test_batch",))


class CIFAR10(Config):
    """Its binary version, `data_batch_1.bin` and others.

    Attributes:
        folder: holds them, there or in folders inside.
    """

    folder: str | None = None

    def load(self) -> Dataset:
        """Return the data; raise `RequestError` if a file is missing or damaged."""
        train, test = (
            _joined([part_of_cifar(self.folder, "cifar10", name) for name in names]) for names in _PARTS
        )
        return dataset_of("cifar10", train, test, CLASSES, 20)


def _joined(parts: list[Labelled]) -> Labelled:
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


def part_of_cifar(folder: str | None, what: str, name: str, label_bytes: int = 1) -> Labelled:
    """Return the images and labels of one of CIFAR's files, of whose label bytes the last is the label."""
    path = found_in(folder, what, f"{name}.bin")
    images, labels = records(content_of(path), path, label_bytes, SHAPE)
    return images, labels[:, -1]

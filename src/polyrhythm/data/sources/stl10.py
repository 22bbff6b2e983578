"""STL-10: 5,000 + 8,000 photographs of ten classes, 96 by 96 pixels in color, from ImageNet.

Paper: A. Coates, H. Lee, A. Ng, "An analysis of single-layer networks in unsupervised feature learning", AISTATS 2011.
Its images without labels are not used.
"""

from __future__ import annotations

from pathlib import Path

import torch

from polyrhythm.data.dataset import Dataset
from polyrhythm.data.published import Labelled, Origin, content_of, dataset_of, folder_of, found_in, records
from polyrhythm.specs import Config

CLASSES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
_SHAPE = (3, 96, 96)
ORIGIN = Origin(
    (("http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz", "91f7769df0f17e558f3565bffb0c7dfb"),),
    ("train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin"),
)


class STL10(Config):
    """Its binary files, `train_X.bin` and others.

    Attributes:
        folder: folder with the files, at any depth; None: they are downloaded (2.6 GB).
    """

    folder: str | None = None

    def load(self) -> Dataset:
        """Return the data; raise `RequestError` if a file is missing or damaged."""
        root = folder_of(self.folder, "stl10", ORIGIN)
        return dataset_of("stl10", _part(root, "train"), _part(root, "test"), CLASSES, 30)


def _part(root: Path, part: str) -> Labelled:
    path = found_in(root, "stl10", f"{part}_X.bin")
    images, _ = records(content_of(path), path, 0, _SHAPE)
    labels = torch.frombuffer(
        bytearray(content_of(found_in(root, "stl10", f"{part}_y.bin"))), dtype=torch.uint8
    )
    return images.mT.contiguous(), labels.long() - 1  # images lie column by column

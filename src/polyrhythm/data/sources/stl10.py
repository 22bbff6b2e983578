"""STL-10: 5,000 + 8,000 photographs of ten classes, 96 by 96 pixels in colour, from ImageNet.

Paper: A. Coates, H. Lee, A. Ng, "An analysis of single-layer networks in unsupervised feature learning", AISTATS 2011.
Its pictures without labels are not used.
"""

from __future__ import annotations

import torch

from polyrhythm.data.dataset import Dataset
from polyrhythm.data.published import Labelled, content_of, dataset_of, found_in, records
from polyrhythm.specs import Config

CLASSES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
_SHAPE = (3, 96, 96)


class STL10(Config):
    """Its binary files, `train_X.bin` and others.

    Attributes:
        folder: holds them, there or in folders inside.
    """

    folder: str | None = None

    def load(self) -> Dataset:
        """Return the data; raise `RequestError` if a file is missing or damaged."""
        return dataset_of("stl10", self._part("train"), self._part("test"), CLASSES, 30)

    def _part(self, part: str) -> Labelled:
        path = found_in(self.folder, "stl10", f"{part}_X.bin")
        images, _ = records(content_of(path), path, 0, _SHAPE)
        labels = torch.frombuffer(
            bytearray(content_of(found_in(self.folder, "stl10", f"{part}_y.bin"))), dtype=torch.uint8
        )
        return images.mT.contiguous(), labels.long() - 1  # pictures lie column by column

"""SVHN: 73,257 + 26,032 house numbers' digits, photographed, 32 by 32 pixels in colour.

Paper: Y. Netzer, T. Wang, A. Coates, A. Bissacco, B. Wu, A. Ng, "Reading digits in natural images with unsupervised
feature learning", NIPS workshop, 2011.
"""

from __future__ import annotations

from polyrhythm.data.dataset import Dataset
from polyrhythm.data.published import dataset_of, found_in, matlab
from polyrhythm.specs import Config


class SVHN(Config):
    """Its files of cropped digits, `train_32x32.mat` and `test_32x32.mat`.

    Attributes:
        folder: holds them, there or in folders inside.
    """

    folder: str | None = None

    def load(self) -> Dataset:
        """Return the data; raise `RequestError` if a file is missing or damaged."""
        train, test = (
            matlab(found_in(self.folder, "svhn", f"{part}_32x32.mat")) for part in ("train", "test")
        )
        return dataset_of("svhn", train, test, tuple("0123456789"), 10)

"""SVHN: 73,257 + 26,032 house numbers' digits, photographed, 32 by 32 pixels in color.

Paper: Y. Netzer, T. Wang, A. Coates, A. Bissacco, B. Wu, A. Ng, "Reading digits in natural images with unsupervised
feature learning", NIPS workshop, 2011.
"""

from __future__ import annotations

from polyrhythm.data.dataset import Dataset
from polyrhythm.data.published import Origin, dataset_of, folder_of, found_in, matlab
from polyrhythm.specs import Config

_ADDRESS = "http://ufldl.stanford.edu/housenumbers/"
ORIGIN = Origin(
    (
        (f"{_ADDRESS}train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
        (f"{_ADDRESS}test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
    )
)


class SVHN(Config):
    """Its files of cropped digits, `train_32x32.mat` and `test_32x32.mat`.

    Attributes:
        folder: folder with the files, at any depth; None: they are downloaded.
    """

    folder: str | None = None

    def load(self) -> Dataset:
        """Return the data; raise `RequestError` if a file is missing or damaged."""
        root = folder_of(self.folder, "svhn", ORIGIN)
        train, test = (matlab(found_in(root, "svhn", f"{part}_32x32.mat")) for part in ("train", "test"))
        return dataset_of("svhn", train, test, tuple("0123456789"), 10)

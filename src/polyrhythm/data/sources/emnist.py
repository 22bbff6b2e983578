"""EMNIST: handwritten digits and letters, 28 by 28 gray pixels.

Paper: G. Cohen, S. Afshar, J. Tapson, A. van Schaik, "EMNIST: an extension of MNIST to handwritten letters", 2017,
arXiv:1702.05373. The files hold every image turned over its diagonal, which is undone here.
"""

from __future__ import annotations

from string import ascii_lowercase, ascii_uppercase, digits
from typing import Literal

from polyrhythm.data.dataset import Dataset
from polyrhythm.data.published import Origin, dataset_of, folder_of
from polyrhythm.data.sources.fashion_mnist import idx_part
from polyrhythm.specs import Config

_MERGED = digits + ascii_uppercase + "abdefghnqrt"
"""Without the small letters that look like their capitals."""
CLASSES = {
    "byclass": digits + ascii_uppercase + ascii_lowercase,
    "bymerge": _MERGED,
    "balanced": _MERGED,
    "letters": ascii_lowercase,
    "digits": digits,
    "mnist": digits,
}

ORIGIN = Origin(
    (("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e"),),
    tuple(
        f"emnist-{split}-{part}-{kind}-ubyte.gz"
        for split in CLASSES
        for part in ("train", "test")
        for kind in ("images-idx3", "labels-idx1")
    ),
)


class EMNIST(Config):
    """One of its six divisions.

    Attributes:
        folder: folder with the idx files, gzipped or not, at any depth; None: they are downloaded.
        split: name of the division.
    """

    folder: str | None = None
    split: Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"] = "balanced"

    def load(self) -> Dataset:
        """Return the data; raise `RequestError` if a file is missing or damaged."""
        root = folder_of(self.folder, "emnist", ORIGIN)
        parts = [idx_part(root, "emnist", f"emnist-{self.split}-{part}") for part in ("train", "test")]
        first = 1 if self.split == "letters" else 0
        train, test = ((images.mT.contiguous(), labels - first) for images, labels in parts)
        return dataset_of(f"emnist {self.split}", train, test, tuple(CLASSES[self.split]), 5)

"""KMNIST: 60,000 + 10,000 cursive Japanese characters, ten classes, 28 by 28 gray pixels.

Paper: T. Clanuwat and others, "Deep learning for classical Japanese literature", 2018, arXiv:1812.01718.
"""

from __future__ import annotations

from polyrhythm.data.dataset import Dataset
from polyrhythm.data.published import Origin, dataset_of, folder_of
from polyrhythm.data.sources.fashion_mnist import idx_part
from polyrhythm.specs import Config

CLASSES = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")

_ADDRESS = "http://codh.rois.ac.jp/kmnist/dataset/kmnist/"
ORIGIN = Origin(
    (
        (f"{_ADDRESS}train-images-idx3-ubyte.gz", "bdb82020997e1d708af4cf47b453dcf7"),
        (f"{_ADDRESS}train-labels-idx1-ubyte.gz", "e144d726b3acfaa3e44228e80efcd344"),
        (f"{_ADDRESS}t10k-images-idx3-ubyte.gz", "5c965bf0a639b31b8f53240b1b52f4d7"),
        (f"{_ADDRESS}t10k-labels-idx1-ubyte.gz", "7320c461ea6c1c855c0b718fb2a4b134"),
    )
)


class KMNIST(Config):
    """The four idx files.

    Attributes:
        folder: folder with the files, gzipped or not, at any depth, as torchvision saves them; None: they are
            downloaded.
    """

    folder: str | None = None

    def load(self) -> Dataset:
        """Return the data; raise `RequestError` if a file is missing or damaged."""
        root = folder_of(self.folder, "kmnist", ORIGIN)
        train, test = (idx_part(root, "kmnist", part) for part in ("train", "t10k"))
        return dataset_of("kmnist", train, test, CLASSES, 5)

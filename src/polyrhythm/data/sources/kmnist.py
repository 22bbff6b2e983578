"""KMNIST: 60,000 + 10,000 cursive Japanese characters, ten classes, 28 by 28 grey pixels.

Paper: T. Clanuwat and others, "Deep learning for classical Japanese literature", 2018, arXiv:1812.01718.
"""

from __future__ import annotations

from polyrhythm.data.dataset import Dataset
from polyrhythm.data.published import dataset_of
from polyrhythm.data.sources.fashion_mnist import idx_part
from polyrhythm.specs import Config

CLASSES = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")


class KMNIST(Config):
    """The four idx files.

    Attributes:
        folder: holds them, gzipped or not, there or in folders inside, as torchvision leaves them.
    """

    folder: str | None = None

    def load(self) -> Dataset:
        """Return the data; raise `RequestError` if a file is missing or damaged."""
        train, test = (idx_part(self.folder, "kmnist", part) for part in ("train", "t10k"))
        return dataset_of("kmnist", train, test, CLASSES, 5)

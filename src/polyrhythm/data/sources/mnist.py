"""MNIST: 60,000 + 10,000 handwritten digits, 28 by 28 grey pixels.

Paper: Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, "Gradient-based learning applied to document recognition",
Proceedings of the IEEE 86(11), 1998.
"""

from __future__ import annotations

from polyrhythm.data.dataset import Dataset
from polyrhythm.data.published import dataset_of
from polyrhythm.data.sources.fashion_mnist import idx_part
from polyrhythm.specs import Config

CLASSES = tuple("0123456789")


class MNIST(Config):
    """The four idx files.

    Attributes:
        folder: holds them, gzipped or not, there or in folders inside, as torchvision leaves them.
    """

    folder: str | None = None

    def load(self) -> Dataset:
        """Return the data; raise `RequestError` if a file is missing or damaged."""
        train, test = (idx_part(self.folder, "mnist", part) for part in ("train", "t10k"))
        return dataset_of("mnist", train, test, CLASSES, 5)

"""MNIST: 60,000 + 10,000 handwritten digits, 28 by 28 gray pixels.

Paper: Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, "Gradient-based learning applied to document recognition",
Proceedings of the IEEE 86(11), 1998.
"""

from __future__ import annotations

from polyrhythm.data.dataset import Dataset
from polyrhythm.data.published import Origin, dataset_of, folder_of
from polyrhythm.data.sources.fashion_mnist import idx_part
from polyrhythm.specs import Config

CLASSES = tuple("0123456789")

_ADDRESS = "https://ossci-datasets.s3.amazonaws.com/mnist/"
ORIGIN = Origin(
    (
        (f"{_ADDRESS}train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        (f"{_ADDRESS}train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
        (f"{_ADDRESS}t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
        (f"{_ADDRESS}t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
    )
)


class MNIST(Config):
    """The four idx files.

    Attributes:
        folder: folder with the files, gzipped or not, at any depth, as torchvision saves them; None: they are
            downloaded.
    """

    folder: str | None = None

    def load(self) -> Dataset:
        """Return the data; raise `RequestError` if a file is missing or damaged."""
        root = folder_of(self.folder, "mnist", ORIGIN)
        train, test = (idx_part(root, "mnist", part) for part in ("train", "t10k"))
        return dataset_of("mnist", train, test, CLASSES, 5)

"""Fashion-MNIST: 60,000 + 10,000 grey pictures of clothes, 28 by 28 pixels, ten classes.

Paper: H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
Algorithms", 2017, arXiv:1708.07747.
"""

from __future__ import annotations

from pathlib import Path

from polyrhythm.data.dataset import Dataset, TensorSplit
from polyrhythm.data.files.cache import cache_folder
from polyrhythm.data.files.fetching import download, unpack_debian
from polyrhythm.data.files.idx import parse_idx
from polyrhythm.data.files.verified_files import VerifiedFile, read_all
from polyrhythm.errors import RequestError
from polyrhythm.specs import Config

SYSTEM_FOLDER = Path("/usr/share/datasets/fashion-mnist")
ADDRESS = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
PACKAGE = "dataset-fashion-mnist"

FILES = (
    VerifiedFile(
        "train-images-idx3-ubyte",
        47_040_016,
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    VerifiedFile(
        "train-labels-idx1-ubyte",
        60_008,
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    VerifiedFile(
        "t10k-images-idx3-ubyte",
        7_840_016,
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    VerifiedFile(
        "t10k-labels-idx1-ubyte",
        10_008,
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
)

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

# Of the training images, with pixels from 0 to 1.
MEAN = 0.2860
STD = 0.3530


class FashionMNIST(Config):
    """Fashion-MNIST.

    Attributes:
        folder: holds its four idx files, gzipped or not; None: look in the system's folder, in the cache, on
            the web, in the Debian package, in this order.
    """

    folder: str | None = None

    def load(self) -> Dataset:
        """Reads it, fetching it first where need be; pixels are normalised by mean and deviation.

        Raises:
            RequestError: the given folder lacks a file or holds a damaged one; or it is nowhere to be had.
        """
        if self.folder is None:
            contents = find_or_fetch(SYSTEM_FOLDER, cache_folder() / "fashion-mnist", ADDRESS)
        else:
            contents = read_all(Path(self.folder).expanduser(), FILES)
        images, labels, test_images, test_labels = map(parse_idx, contents)
        train = TensorSplit(images.unsqueeze(1), labels, 255 * MEAN, 255 * STD)
        test = TensorSplit(test_images.unsqueeze(1), test_labels, 255 * MEAN, 255 * STD)
        black, white = (-MEAN / STD,), ((1 - MEAN) / STD,)
        return Dataset("fashion-mnist", train, test, CLASSES, (1, 28, 28), 5, black=black, white=white)


def find_or_fetch(system: Path, cache: Path, address: str) -> list[bytes]:
    """Gives the contents of `FILES` from the first place that has them all.

    Args:
        system: the folder of the system's data sets.
        cache: where earlier fetches lie, and this one is put.
        address: of the folder on the web.

    Raises:
        RequestError: no place has them; it says why, and what to do.
    """
    for folder in (system, cache):
        # A damaged or half-filled folder is no reason to stop: the next place may be right.
        try:
            return read_all(folder, FILES)
        except RequestError:
            continue
    reasons = []
    for fetch, origin in ((download, address), (unpack_debian, PACKAGE)):
        try:
            fetch(origin, FILES, cache)
            return read_all(cache, FILES)
        except RequestError as error:
            reasons.append(str(error))
    raise RequestError(
        f"fashion-mnist is neither in {system} nor to be fetched ({'; '.join(reasons)}): "
        f"install the package {PACKAGE}, or name the folder of its four files: fashion-mnist=FOLDER"
    )

"""CIFAR-100: 50,000 + 10,000 photographs of 100 classes, 32 by 32 pixels in color.

Report: A. Krizhevsky, "Learning multiple layers of features from tiny images", University of Toronto, 2009.
"""

from __future__ import annotations

from pathlib import Path

from polyrhythm.data.dataset import Dataset
from polyrhythm.data.published import Origin, content_of, dataset_of, folder_of, found_in
from polyrhythm.data.sources.cifar10 import part_of_cifar
from polyrhythm.errors import RequestError
from polyrhythm.specs import Config

ORIGIN = Origin(
    (("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),),
    ("train.bin", "test.bin", "fine_label_names.txt"),
)


class CIFAR100(Config):
    """Its binary version, `train.bin`, `test.bin` and `fine_label_names.txt`.

    Attributes:
        folder: folder with the files, at any depth; None: they are downloaded.
    """

    folder: str | None = None

    def load(self) -> Dataset:
        """Return the data with its hundred fine classes; raise `RequestError` if a file is missing or damaged."""
        root = folder_of(self.folder, "cifar100", ORIGIN)
        train, test = (part_of_cifar(root, "cifar100", name, 2) for name in ("train", "test"))
        return dataset_of("cifar100", train, test, _classes(root), 20)


def _classes(root: Path) -> tuple[str, ...]:
    names = content_of(found_in(root, "cifar100", "fine_label_names.txt")).decode().split()
    if len(names) != 100:
        raise RequestError(f"cifar100 has {len(names)} names of classes: fetch its files again")
    return tuple(names)

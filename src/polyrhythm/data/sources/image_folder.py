"""A folder of images: `train/<class>/*.jpg`, and `test/<class>/*.jpg` or `val/<class>/*.jpg`; or `<class>/*.jpg`."""

from __future__ import annotations

from pathlib import Path

import torch

from polyrhythm.data.dataset import Dataset
from polyrhythm.data.dealing import held_out
from polyrhythm.data.image_files import PictureSource, list_images
from polyrhythm.errors import RequestError

ByClass = dict[str, list[str]]
_TEST_PARTS = ("test", "val")


class ImageFolder(PictureSource):
    """A folder of images.

    Attributes:
        folder: contains `train`, and `test` or else `val`; or the classes themselves. Without test images a fixed fifth
            of every class is held out for testing.
    """

    folder: str

    def load(self) -> Dataset:
        """List and check the images; they are decoded later, batch by batch.

        Up to 20,000 images are decoded once to check that they are complete; of more, only the headers are read.

        Raises:
            RequestError: no `train`, no images, a class without any, one class only, a class that only the
                test images have, or images that cannot be read.
        """
        root = Path(self.folder).expanduser()
        train_folder = _train_folder(root)
        test_folder = next((root / name for name in _TEST_PARTS if (root / name).is_dir()), None)
        train, test = list_images(train_folder), list_images(test_folder) if test_folder else {}
        skipped = self.refuse_unreadable(
            [path for part in (train, test) for files in part.values() for path in files]
        )
        train, test = _without(skipped, train), _without(skipped, test)
        _check_train(train_folder, train)
        if test_folder:
            _check_test(test_folder, test, train_folder, train)
        return self._dataset(train, test, skipped)

    def _dataset(self, train: ByClass, test: ByClass, skipped: tuple[str, ...]) -> Dataset:
        classes = tuple(train)
        if test:
            parts = [_flat(train, classes), _flat(test, classes)]
        else:
            files, labels = _flat(train, classes)
            parts = [([files[i] for i in part.tolist()], labels[part]) for part in held_out(labels)]
            if not parts[1][0]:
                raise RequestError(f"{self.folder} has too few images to hold some out: add a test folder")
        learn, check = (self.of_files(files, labels) for files, labels in parts)
        return self.dataset(self.folder, learn, check, classes, skipped)


def _train_folder(root: Path) -> Path:
    """Return the folder of the classes: `train`, or the folder itself if it contains nothing but classes."""
    train_folder = root / "train"
    if train_folder.is_dir():
        return train_folder
    if _holds_classes(root):
        return root
    if root.is_file():
        raise RequestError(f"{root} is a file: name a folder with images in train/<class>/ or <class>/")
    missing = train_folder if root.is_dir() else root
    raise RequestError(
        f"there is no folder {missing}: put images into {train_folder}/<class>/ or {root}/<class>/"
    )


def _holds_classes(root: Path) -> bool:
    """Whether the subfolders of a folder are classes: they hold images, none of them in subfolders of their own."""
    if not root.is_dir() or any((root / part).is_dir() for part in _TEST_PARTS):
        return False
    classes = list_images(root)
    files = [(root / name, path) for name, paths in classes.items() for path in paths]
    return len(classes) > 1 and bool(files) and all(Path(path).parent == folder for folder, path in files)


def _without(skipped: tuple[str, ...], part: ByClass) -> ByClass:
    left_out = frozenset(skipped)
    return {name: [path for path in files if path not in left_out] for name, files in part.items()}


def _flat(part: ByClass, classes: tuple[str, ...]) -> tuple[list[str], torch.Tensor]:
    labelled = [(path, label) for label, name in enumerate(classes) for path in part.get(name, ())]
    return [path for path, _ in labelled], torch.tensor([label for _, label in labelled], dtype=torch.int64)


def _check_train(folder: Path, part: ByClass) -> None:
    if not any(part.values()):
        raise RequestError(f"no images in {folder}/<class>/: put some there (jpg, png, webp, …)")
    if len(part) == 1:
        raise RequestError(
            f"{folder} holds one class only ({next(iter(part))}): a classifier needs at least two"
        )
    for name, files in part.items():
        if not files:
            raise RequestError(f"no images in {folder / name}: put some there, or remove this class")


def _check_test(folder: Path, part: ByClass, train_folder: Path, train: ByClass) -> None:
    if not any(part.values()):
        raise RequestError(f"no images in {folder}/<class>/: put some there, or remove {folder}")
    strange = [name for name, files in part.items() if files and name not in train]
    if strange:
        raise RequestError(
            f"{folder} has classes that {train_folder} lacks ({', '.join(strange)}): "
            "add them there, or remove them"
        )

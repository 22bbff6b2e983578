"""A folder of images: `train/<class>/*.jpg`, and `test/<class>/*.jpg` or `val/<class>/*.jpg`; or `<class>/*.jpg`.

`validation` and `valid` are read like `val`. What is not read is counted and named (`Dataset.remark`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from polyrhythm.data.dataset import Dataset, ExcludedFiles
from polyrhythm.data.dealing import Sides, held_out_by_name
from polyrhythm.data.image_files import ImageSource, Listing, list_folder, list_images, relative_names, sample
from polyrhythm.errors import RequestError

ByClass = dict[str, list[str]]
_TEST_PARTS = ("test", "val", "validation", "valid")


class ImageFolder(ImageSource):
    """A folder of images.

    Attributes:
        folder: folder that contains `train` and one of `test`, `val`, `validation` and `valid` (the first that
            exists is read), or the classes themselves. Without test images a fifth of every class is held out
            for testing.
    """

    folder: str

    def encoded(self) -> Sequence[str]:
        return sample(_paths(list_images(_train_folder(Path(self.folder).expanduser()))))

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
        listings = [list_folder(part) for part in (train_folder, test_folder) if part is not None]
        train, test = listings[0].classes, listings[1].classes if test_folder else {}
        skipped = self.refuse_unreadable(
            [path for part in (train, test) for files in part.values() for path in files]
        )
        train, test = _without(skipped, train), _without(skipped, test)
        _check_train(train_folder, train)
        left_out = _left_out(root, (train_folder, test_folder), listings)
        if test_folder:
            moved = self._trained_on(train_folder, train, test_folder, test)
            if moved:
                test = _without(moved, test)
                left_out += (
                    ExcludedFiles("test image", "left out, as the network was trained on it", moved),
                )
            _check_test(test_folder, test, train_folder, train)
        return self._dataset(train_folder, train, test_folder, test, skipped, left_out)

    def _trained_on(
        self, train_folder: Path, train: ByClass, test_folder: Path, test: ByClass
    ) -> tuple[str, ...]:
        """Return test images that were trained on before they were moved into the test folder."""
        if not isinstance(self._dealt, Sides):
            return ()
        gone = self._dealt.trained.difference(relative_names(_paths(train), train_folder))
        files = _paths(test)
        names = relative_names(files, test_folder)
        return tuple(path for path, name in zip(files, names, strict=True) if name in gone)

    def _dataset(
        self,
        train_folder: Path,
        train: ByClass,
        test_folder: Path | None,
        test: ByClass,
        skipped: tuple[str, ...],
        left_out: tuple[ExcludedFiles, ...],
    ) -> Dataset:
        classes = tuple(train)
        files, labels = _flat(train, classes)
        names = relative_names(files, train_folder)
        if test_folder is not None:
            tested = _flat(test, classes)
            parts = [(files, labels), tested]
            part_names = names, relative_names(tested[0], test_folder)
        else:
            sides = held_out_by_name(names, labels, self._dealt)
            parts = [([files[i] for i in part.tolist()], labels[part]) for part in sides]
            part_names = ([names[i] for i in sides[0].tolist()], [names[i] for i in sides[1].tolist()])
            if not parts[1][0]:
                raise RequestError(f"{self.folder} has too few images to hold some out: add a test folder")
        learn, check = (self.of_files(paths, of_paths) for paths, of_paths in parts)
        return self.dataset(
            self.folder,
            learn,
            check,
            classes,
            skipped,
            names=part_names,
            held_out=test_folder is None,
            left_out=left_out,
        )


def _left_out(
    root: Path, parts: tuple[Path, Path | None], listings: Sequence[Listing]
) -> tuple[ExcludedFiles, ...]:
    """Return the contents of a folder that are not read."""
    beside: list[str] = []
    if parts[0] != root:
        with suppress(OSError):  # a folder may be passed through that cannot be listed
            beside = sorted(str(entry) for entry in root.iterdir() if entry not in parts)
    kinds = (
        ("entry", f"not read, next to {parts[0].name}", beside),
        (
            "file",
            "not read, for an ending that no image has",
            [path for each in listings for path in each.other_files],
        ),
        (
            "file",
            "not read, next to the classes' folders",
            [path for each in listings for path in each.loose],
        ),
        ("link", "not followed, inside a class", [path for each in listings for path in each.links]),
        ("hidden file", "not read", [path for each in listings for path in each.hidden]),
    )
    return tuple(ExcludedFiles(what, why, tuple(names)) for what, why, names in kinds if names)


def _paths(part: ByClass) -> list[str]:
    return [path for files in part.values() for path in files]


def _train_folder(root: Path) -> Path:
    """Return the folder of the classes: `train`, or the folder itself if it contains nothing but classes."""
    train_folder = root / "train"
    if train_folder.is_dir():
        return train_folder
    if _holds_classes(root):
        return root
    if root.is_file():
        raise RequestError(f"{root} is a file: name a folder with images in train/<class>/ or <class>/")
    if _holds_classes(root, least=1):
        _check_train(root, {name: files for name, files in list_images(root).items() if files})
    missing = train_folder if root.is_dir() else root
    raise RequestError(
        f"there is no folder {missing}: put images into {train_folder}/<class>/ or {root}/<class>/"
    )


def _holds_classes(root: Path, least: int = 2) -> bool:
    """Whether the subfolders of a folder are classes, `least` or more: all images are directly in one of them."""
    if not root.is_dir() or any((root / part).is_dir() for part in _TEST_PARTS):
        return False
    classes = list_images(root)
    files = _paths(classes)
    return len(classes) >= least and bool(files) and all(Path(path).parent.parent == root for path in files)


def _without(skipped: tuple[str, ...], part: ByClass) -> ByClass:
    left_out = frozenset(skipped)
    return {name: [path for path in files if path not in left_out] for name, files in part.items()}


def _flat(part: ByClass, classes: tuple[str, ...]) -> tuple[list[str], torch.Tensor]:
    labeled = [(path, label) for label, name in enumerate(classes) for path in part.get(name, ())]
    return [path for path, _ in labeled], torch.tensor([label for _, label in labeled], dtype=torch.int64)


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

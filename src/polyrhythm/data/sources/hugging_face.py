"""Data sets as the library `datasets` keeps them: of the Hugging Face hub, or Arrow and Parquet files on this machine.

    hf://OWNER/NAME         of the hub, or of its cache (HF_HOME); a subset is `hugging_face(path=…, subset=…)`
    a folder                what `save_to_disk` has left
    photos/*.parquet        tables that hold the images themselves; files are train or test by their names
    photos/*.arrow          the same

Q. Lhoest and others, "Datasets: a community library for natural language processing", EMNLP 2021, arXiv:2109.02846.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from glob import glob
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyrhythm.data.dataset import Dataset, normal
from polyrhythm.data.dealing import held_out_by_name
from polyrhythm.data.image_files import Decoder, ImageSource, sample
from polyrhythm.data.images import NORMALIZATIONS, UnreadableImage, read_pixels, read_whole
from polyrhythm.errors import RequestError

HUB = "hf://"
FILES = (".parquet", ".arrow")
_TEST_PARTS = ("test", "validation", "valid", "val", "dev")
_NAME_DIGITS = 16
_PLAUSIBLE = ("label", "labels", "class", "fine_label", "target", "cls")


class HuggingFace(ImageSource):
    """A data set of the library `datasets`.

    Attributes:
        path: `hf://OWNER/NAME`, a folder, or files with `*` for any text.
        subset: configuration of a data set of the hub, where it has several.
        train: name of the split to learn from.
        test: name of the split to test on; empty: the first of test, validation, valid, val and dev that is there, or
            else a fifth of every class is held out.
        image: column of the images; empty: the only one of that type.
        label: column of the classes; empty: the only one of that type, or else one called label, class and the like.
    """

    path: str
    subset: str = ""
    train: str = "train"
    test: str = ""
    image: str = ""
    label: str = ""

    def encoded(self) -> Iterable[str | IO[bytes]]:
        table = self._parts().get(self.train, [])
        if len(table):
            import datasets

            column, _ = self._columns(table)
            cells = table.cast_column(column, datasets.Image(decode=False))[sample(range(len(table)))][column]
            yield from (
                BytesIO(cell["bytes"]) if cell.get("bytes") else cell["path"] for cell in cells if cell
            )

    def load(self) -> Dataset:
        """List the images, and look at each once.

        Raises:
            RequestError: the library is missing, there is no such data set, split or column, or it is no classification
                of images; an image cannot be read; test classes that training lacks.
        """
        parts = self._parts()
        if self.train not in parts:
            raise RequestError(
                f"{self.path} has the splits {', '.join(parts)}: name the one to learn from, as in "
                f'--data "hugging_face(path={self.path}, train={next(iter(parts))})"'
            )
        test = self.test or next((name for name in _TEST_PARTS if name in parts), "")
        if test and test not in parts:
            raise RequestError(f"{self.path} has no split {test}: it has {', '.join(parts)}")
        image, label = self._columns(parts[self.train])
        learned = _named(parts[self.train], label)
        classes = _classes(parts[self.train], label, learned)
        tested = _named(parts[test], label) if test else []
        if strange := sorted(set(tested) - set(classes)):
            raise RequestError(
                f"the split {test} of {self.path} has labels that {self.train} lacks ({', '.join(strange[:5])}): name "
                "another with test=…"
            )
        train, skipped = self._split(parts[self.train], image, learned, classes)
        check, more = self._split(parts[test], image, tested, classes) if test else (train, ())
        names: tuple[list[str], list[str]] | None = None
        if not test:
            whole = train.names()
            learn, held = held_out_by_name(whole, train.labels, self._dealt)
            train, check = train.part(learn), train.part(held)
            names = [whole[i] for i in learn.tolist()], [whole[i] for i in held.tolist()]
        if not len(train) or not len(check):
            raise RequestError(f"{self.path} leaves {len(train)} training and {len(check)} test images")
        return self.dataset(str(self), train, check, classes, skipped + more, names=names, held_out=not test)

    def _parts(self) -> dict[str, Any]:
        try:
            import datasets
        except ImportError:
            raise RequestError(
                f"reading {self.path} takes the package datasets: pip install 'polyrhythm[datasets]'"
            ) from None
        try:
            found = self._opened(datasets)
        except RequestError:
            raise
        except Exception as error:  # of many kinds: the network, the files, the library's own
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RequestError(f"{self.path} cannot be opened ({reason})") from None
        return dict(found) if isinstance(found, dict) else {self.train: found}

    def _opened(self, datasets: Any) -> Any:
        if self.path.startswith(HUB):
            return datasets.load_dataset(self.path.removeprefix(HUB), self.subset or None)
        place = Path(self.path).expanduser()
        if place.is_dir() and is_saved(place):
            return datasets.load_from_disk(str(place))
        pattern = str(place / "**" / "*.parquet" if place.is_dir() else place)
        files = sorted(glob(pattern, recursive=True))
        if not files:
            raise RequestError(
                f"there are no files {pattern}: name .parquet or .arrow files, with * for any text"
            )
        kind = Path(files[0]).suffix.removeprefix(".")
        return datasets.load_dataset(kind, data_files=_by_part(files, self.train))

    def _columns(self, table: Any) -> tuple[str, str]:
        kinds = {name: type(kind).__name__ for name, kind in table.features.items()}
        images = [name for name, kind in kinds.items() if kind == "Image"]
        classes = [name for name, kind in kinds.items() if kind == "ClassLabel"]
        plausible = [name for name in _PLAUSIBLE if name in kinds]
        image = self.image or (images[0] if len(images) == 1 else "")
        label = self.label or (classes[0] if len(classes) == 1 else next(iter(plausible), ""))
        for what, name, given in (("image", image, self.image), ("label", label, self.label)):
            if name not in kinds:
                columns = ", ".join(f"{each} ({kind})" for each, kind in kinds.items())
                problem = f"no column {given}" if given else f"no one column that is the {what}"
                raise RequestError(f"{self.path} has {problem}: name one of {columns} with {what}=…")
        return image, label

    def _split(
        self, table: Any, image: str, labels: Sequence[str], classes: Sequence[str]
    ) -> tuple[TableSplit, tuple[str, ...]]:
        import datasets

        numbers = {name: number for number, name in enumerate(classes)}
        encoded = table.select_columns([image]).cast_column(image, datasets.Image(decode=False))
        targets = torch.tensor([numbers[name] for name in labels], dtype=torch.int64)
        split = TableSplit(encoded, image, torch.arange(len(targets)), targets, self)
        bad = split.unreadable()
        if bad and not self.skip_unreadable:
            number, reason = next(iter(bad.items()))
            more = f", and {len(bad) - 1} more cannot" if len(bad) > 1 else ""
            raise RequestError(
                f"image {number} of {self.path} cannot be read ({reason}){more}: skip such images with "
                "--skip-unreadable"
            )
        whole = torch.tensor(
            [number for number in range(len(targets)) if number not in bad], dtype=torch.int64
        )
        return split.part(whole), tuple(f"{self.path}: image {number}" for number in bad)


class TableSplit:
    """Images in the rows of a table, decoded a batch at a time by as many threads as torch may use.

    Args:
        table: table of the library `datasets`, with encoded images.
        column: column of the images.
        rows: (n,) int64, those of the split.
        labels: (n,) int64.
        reading: size, normalization and shown part of the images.
    """

    def __init__(self, table: Any, column: str, rows: Tensor, labels: Tensor, reading: ImageSource) -> None:
        self._table = table
        self._column = column
        self._rows = rows
        self._reading = reading
        self.labels = labels

    def __len__(self) -> int:
        return len(self._rows)

    def part(self, indices: Tensor) -> TableSplit:
        """Return the split of some of its images."""
        return TableSplit(self._table, self._column, self._rows[indices], self.labels[indices], self._reading)

    def names(self) -> list[str]:
        """Return a name of every image: a hash of its bytes, as the rows of a table may be in another order later."""
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            return list(threads.map(self._name, range(len(self))))

    def _name(self, number: int) -> str:
        cell = self._table[int(self._rows[number])][self._column] or {}
        if cell.get("bytes"):
            return sha256(cell["bytes"]).hexdigest()[:_NAME_DIGITS]
        return normal(str(cell.get("path")))

    def images(self, indices: Tensor) -> Tensor:
        """Return (B, 3, size, size) float32, normalized."""
        return self.normalized(self.decoded(indices))

    def decoded(self, indices: Tensor) -> Tensor:
        """Return (B, size, size, 3) uint8; raise `RequestError` if one cannot be read."""
        size = self._reading.image_size
        if len(indices) == 0:
            return torch.empty(0, size, size, 3, dtype=torch.uint8)
        decode = partial(read_pixels, image_size=size, share=self._reading.shown)
        return torch.from_numpy(np.stack(self._read(indices, decode)))

    def normalized(self, decoded: Tensor) -> Tensor:
        """Return (B, 3, size, size) float32 in new memory."""
        return NORMALIZATIONS[self._reading.pixels](decoded)

    def whole(self, indices: Tensor, shorter_side: int) -> list[Tensor]:
        """Return whole images, (3, H, W) float32 each, with `shorter_side` pixels on their shorter side."""
        pixels = self._read(indices, partial(read_whole, shorter_side=shorter_side))
        return [self.normalized(torch.from_numpy(np.array(each))[None])[0] for each in pixels]

    def unreadable(self) -> dict[int, str]:
        """Return the number of every image that cannot be read, and why."""
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            reasons = threads.map(
                partial(self._tried, decode=partial(read_pixels, image_size=1)), range(len(self))
            )
            return {number: each for number, each in enumerate(reasons) if isinstance(each, str)}

    def _read(self, indices: Tensor, decode: Decoder) -> list[NDArray[np.uint8]]:
        numbers = indices.tolist()
        with ThreadPoolExecutor(min(len(numbers), torch.get_num_threads())) as threads:
            found = list(threads.map(partial(self._tried, decode=decode), numbers))
        pixels = [each for each in found if not isinstance(each, str)]
        if len(pixels) < len(found):
            reason = next(each for each in found if isinstance(each, str))
            raise RequestError(f"an image of {self._reading} cannot be read ({reason})")
        return pixels

    def _tried(self, number: int, decode: Any) -> NDArray[np.uint8] | str:
        try:
            cell = self._table[int(self._rows[number])][self._column] or {}
            if cell.get("bytes"):
                found: NDArray[np.uint8] = decode(BytesIO(cell["bytes"]))
            elif cell.get("path"):
                found = decode(cell["path"])
            else:
                return "there is no image"
        except UnreadableImage as error:
            return str(error)
        return found


def is_saved(folder: Path) -> bool:
    """Whether a folder is what `save_to_disk` of the library has left."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def holds_pictures(file: Path) -> bool:
    """Whether a Parquet file holds images themselves, as structures of bytes and path, and not only their paths."""
    try:
        from pyarrow import parquet, types

        return any(types.is_struct(field.type) for field in parquet.read_schema(file))
    except (ImportError, OSError, ValueError):
        return False


def _by_part(files: Sequence[str], train: str) -> dict[str, list[str]]:
    """Sort files into splits by the word that their names begin with, `train-00000-of-00002.parquet`."""
    parts: dict[str, list[str]] = {}
    for file in files:
        word = Path(file).stem.partition("-")[0].partition(".")[0].lower()
        parts.setdefault(word if word in _TEST_PARTS else train, []).append(file)
    return parts


def _named(table: Any, label: str) -> list[str]:
    kind = table.features[label]
    names = getattr(kind, "names", None)
    values = table[label]
    if any(each is None or (names is not None and each < 0) for each in values):
        raise RequestError(f"the column {label} lacks labels of some images: name another split or column")
    return [normal(names[each] if names is not None else str(each)) for each in values]


def _classes(table: Any, label: str, learned: Iterable[str]) -> tuple[str, ...]:
    """Return the names in the data set's own order where it has one; else sorted, numbers by their value."""
    names = getattr(table.features[label], "names", None)
    found = set(learned)
    if names is not None:
        classes = [normal(name) for name in names if normal(name) in found]
    else:
        classes = sorted(found, key=lambda name: (int(name), "") if name.isdecimal() else (-1, name))
    if len(classes) < 2:
        raise RequestError(f"the column {label} has {len(classes)} class: a classifier needs at least two")
    return tuple(classes)

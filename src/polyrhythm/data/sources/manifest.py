"""A manifest: image files anywhere, with weak labels in a table.

The table lists, image by image, its labels, their confidence, and the subsets and split that it belongs to.

B. Jou and others, "Visual affect around the world" (MVSO), ACM Multimedia 2015, arXiv:1508.03868, has
adjective-noun pairs with subsets of different trust (tag-restricted, tag-pool); trained on by V. Campos
and others, ICCS 2017.

    image,labels,confidence,subset,split
    photos/1.jpg,happy dog|cute dog,0.9|0.4,tag_pool,train
    photos/2.jpg,old house,,tag_restricted,test

Only `image` and `labels` (or `label`) are needed. Paths are relative to the table. Several labels,
confidences and subsets are separated by `|`; a single confidence applies to all labels, and none means 1.
A `split` is train, or test (or val).

Files with the same content are found, whatever their names; most are distinguished by their size alone.
"""

from __future__ import annotations

import csv
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from polyrhythm.data.dataset import Dataset, normal
from polyrhythm.data.dealing import held_out_by_name
from polyrhythm.data.image_files import ImageSource, relative_names, sample
from polyrhythm.errors import RequestError, unknown
from polyrhythm.user_files import check_is_file

SUFFIXES = (".csv", ".tsv", ".parquet")
_BETWEEN = "|"
_SPLITS = {"train": "train", "test": "test", "val": "test", "validation": "test", "": ""}


@dataclass(frozen=True)
class Row:
    """A manifest's entry for one image: labels with confidences from 0 to 1; `split` is empty if it names none."""

    image: str
    labels: tuple[tuple[str, float], ...]
    subsets: frozenset[str]
    split: str


def best_label(row: Row) -> str:
    """Return the label with the highest confidence; of equals the first."""
    return max(row.labels, key=lambda entry: entry[1])[0]


def read_manifest(path: Path) -> list[Row]:
    """Read a manifest ending in .csv, .tsv (tabs) or .parquet (which needs the package pyarrow).

    Raises:
        RequestError: it cannot be read, or a line of it is invalid.
    """
    rows = _parquet(path) if path.suffix.lower() == ".parquet" else _text(path)
    found = [_row(path, number, entry) for number, entry in enumerate(rows, start=1)]
    if not found:
        raise RequestError(f"{path} lists no images: give it lines below its heading")
    if len({bool(row.split) for row in found}) > 1:
        raise RequestError(f"{path} has a split for some images, and none for others: give all of them one")
    return found


def _text(path: Path) -> Iterable[Mapping[str, Any]]:
    check_is_file(path, "the manifest")
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file, delimiter=delimiter))
    except OSError as error:
        raise RequestError(f"the manifest {path} cannot be read ({error.strerror}): name another") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise RequestError(f"the manifest {path} is not a table of text in UTF-8 ({error})") from None


def _parquet(path: Path) -> Iterable[Mapping[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise RequestError(
            f"reading {path} takes the package pyarrow: pip install 'polyrhythm[parquet]', or give a CSV file"
        ) from None
    check_is_file(path, "the manifest")
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise RequestError(f"the manifest {path} cannot be read ({error}): name another") from None
    return rows


def _row(path: Path, number: int, entry: Mapping[str, Any]) -> Row:
    where = f"{path}, image {number}"
    image = str(entry.get("image") or "").strip()
    names = _parts(entry.get("labels") or entry.get("label"))
    if "image" not in entry or not entry.keys() & {"labels", "label"}:
        columns = ", ".join(str(column) for column in entry)
        raise RequestError(f"{path} has the columns {columns}: it needs image and labels, in its first line")
    if not image or not names:
        raise RequestError(f"{where}: it needs an image and at least one label, in columns image and labels")
    split = str(entry.get("split") or "").strip().lower()
    if split not in _SPLITS:
        raise RequestError(f"{where}: split {split!r} is unknown: write train or test")
    labels = tuple(zip(names, _confidences(where, entry.get("confidence"), len(names)), strict=True))
    return Row(str(path.parent / image), labels, frozenset(_parts(entry.get("subset"))), _SPLITS[split])


def _parts(value: Any) -> list[str]:
    """Split `a|b`; a list, as in Parquet, is taken as it is."""
    given = value if isinstance(value, list | tuple) else str("" if value is None else value).split(_BETWEEN)
    return [normal(text) for part in given if (text := str(part).strip())]


def _confidences(where: str, value: Any, labels: int) -> list[float]:
    try:
        given = [float(part) for part in _parts(value)] or [1.0]
    except ValueError:
        raise RequestError(f"{where}: confidence {value!r} is not a number: write 0.8, or 0.8|0.3") from None
    given = given * labels if len(given) == 1 else given
    if len(given) != labels or not all(0 <= each <= 1 for each in given):
        raise RequestError(
            f"{where}: {labels} labels need as many confidences, from 0 to 1 (given {value!r})"
        )
    return given


def duplicates(files: Sequence[str], among: Sequence[str]) -> dict[str, str]:
    """Return, for each of `files` with the same bytes as one of `among`, the first such; in the order of `files`."""
    others = _by_size(among)
    suspects = [path for path in dict.fromkeys(files) if (size := _size(path)) is not None and size in others]
    known: dict[str, str] = {}
    for size in {_size(path) for path in suspects} - {None}:
        for path in others[size or 0]:
            known.setdefault(_content(path), path)
    return {path: known[content] for path in suspects if (content := _content(path)) in known}


def _by_size(files: Iterable[str]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = defaultdict(list)
    for path in dict.fromkeys(files):
        if (size := _size(path)) is not None:
            found[size].append(path)
    return found


def _size(path: str) -> int | None:
    try:
        return Path(path).stat().st_size
    except OSError:
        return None


def _content(path: str) -> str:
    with Path(path).open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


Labelled = list[tuple[str, str]]
"""Paths, each with a label."""

_log = logging.getLogger(__name__)


class Manifest(ImageSource):
    """A table of image files and their labels.

    Attributes:
        file: the table, ending in .csv, .tsv or .parquet.
        subset: name of the subset to use, in training and test; empty: all images. Classes are those of the whole
            table, so that a network trained on one subset can be tested on another.
        labels: `best` uses an image's most confident label, `every` one sample per label. Test images have their best.
        min_confidence: minimum confidence of a label; labels below it are dropped.
        duplicates: a training image with the same bytes as a test image: `drop` it, `keep` it, or `refuse` the data.
        skip_unreadable: leave out images that are missing or broken, and test images of classes that training lacks.
    """

    file: str
    subset: str = ""
    labels: Literal["best", "every"] = "best"
    min_confidence: float = Field(default=0.0, ge=0, le=1)
    duplicates: Literal["drop", "keep", "refuse"] = "drop"

    def encoded(self) -> Sequence[str]:
        return sample(
            [row.image for row in read_manifest(Path(self.file).expanduser()) if row.split != "test"]
        )

    def load(self) -> Dataset:
        """Read the table and check its images.

        Raises:
            RequestError: no such table or subset, images that are missing or broken, labels that only test images have,
                or duplicates, if they are refused.
        """
        rows = self._confident(read_manifest(Path(self.file).expanduser()))
        classes = tuple(
            sorted({label for row in rows if row.split != "test" for label, _ in self._learned(row)})
        )
        rows = self._of_subset(rows)
        skipped = self.refuse_unreadable(list(dict.fromkeys(row.image for row in rows)))
        left = [row for row in rows if row.image not in skipped]
        if len(classes) < 2:
            raise RequestError(
                f"{self.file} has {len(classes)} class for training: a classifier needs at least two"
            )
        train, test = self._parts(left, classes)
        train = self._without_duplicates(train, test)
        held_out = not any(row.split for row in left)
        if not train or not test:
            raise RequestError(
                f"{self.file} leaves {len(train)} training and {len(test)} test images: add some"
            )
        return self._dataset(train, test, classes, skipped, held_out=held_out)

    def _confident(self, rows: list[Row]) -> list[Row]:
        kept = []
        for row in rows:
            sure = tuple(entry for entry in row.labels if entry[1] >= self.min_confidence)
            if sure:
                kept.append(Row(row.image, sure, row.subsets, row.split))
        if not kept:
            raise RequestError(f"{self.file} has no label of confidence {self.min_confidence:g} or more")
        return kept

    def _of_subset(self, rows: list[Row]) -> list[Row]:
        if not self.subset:
            return rows
        kept = [row for row in rows if self.subset in row.subsets]
        if not kept:
            raise unknown(
                "subset", self.subset, sorted({name for row in rows for name in row.subsets}) or ["(none)"]
            )
        return kept

    def _learned(self, row: Row) -> tuple[tuple[str, float], ...]:
        return row.labels if self.labels == "every" else ((best_label(row), 1.0),)

    def _parts(self, rows: list[Row], classes: tuple[str, ...]) -> tuple[Labelled, Labelled]:
        if not any(row.split for row in rows):
            labels = torch.tensor([classes.index(best_label(row)) for row in rows])
            parts = held_out_by_name(self._names([row.image for row in rows]), labels, self._dealt)
            train, test = ([rows[i] for i in part.tolist()] for part in parts)
        else:
            train = [row for row in rows if row.split == "train"]
            test = [row for row in rows if row.split == "test"]
        learned = [(row.image, label) for row in train for label, _ in self._learned(row)]
        return learned, self._known([(row.image, best_label(row)) for row in test], classes)

    def _names(self, images: Iterable[str]) -> list[str]:
        """Return the names of images: their paths relative to the table's folder."""
        return relative_names(images, Path(self.file).expanduser().parent)

    def _known(self, test: Labelled, classes: Iterable[str]) -> Labelled:
        strange = sorted({label for _, label in test} - set(classes))
        if strange and not self.skip_unreadable:
            raise RequestError(
                f"{self.file} has test labels that no training image has ({', '.join(strange[:5])}): "
                "add such images, or leave these out with --skip-unreadable"
            )
        return [entry for entry in test if entry[1] not in strange]

    def _without_duplicates(self, train: Labelled, test: Labelled) -> Labelled:
        found = duplicates([path for path, _ in train], [path for path, _ in test])
        if not found or self.duplicates == "keep":
            _report(len(found), found, "kept")
            return train
        if self.duplicates == "refuse":
            path, other = next(iter(found.items()))
            raise RequestError(
                f"{len(found)} training images are test images too, such as {path} ({other}): remove them, or give "
                "duplicates=drop"
            )
        _report(len(found), found, "left out of training")
        return [entry for entry in train if entry[0] not in found]

    def _dataset(
        self,
        train: Labelled,
        test: Labelled,
        classes: tuple[str, ...],
        skipped: tuple[str, ...],
        *,
        held_out: bool,
    ) -> Dataset:
        learn, check = (
            self.of_files(
                [path for path, _ in part], torch.tensor([classes.index(label) for _, label in part])
            )
            for part in (train, test)
        )
        names = self._names([path for path, _ in train]), self._names([path for path, _ in test])
        name = str(self) if self.subset else self.file
        return self.dataset(name, learn, check, classes, skipped, names=names, held_out=held_out)


def _report(count: int, found: dict[str, str], outcome: str) -> None:
    if count:
        path, other = next(iter(found.items()))
        _log.warning(
            "%d training images are test images too, such as %s (%s): %s", count, path, other, outcome
        )

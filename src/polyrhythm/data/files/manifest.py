"""Manifests: tables that say, image by image, which tags it has, how sure that is, and where it belongs.

    image,labels,confidence,subset,split
    photos/1.jpg,happy dog|cute dog,0.9|0.4,tag_pool,train
    photos/2.jpg,old house,,tag_restricted,test

Only `image` and `labels` (or `label`) are needed. Paths are relative to the table. Several labels, confidences and
subsets stand with `|` between; one confidence alone is that of all labels, none is certainty. A `split` is train, or
test (or val).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyrhythm.errors import RequestError

SUFFIXES = (".csv", ".tsv", ".parquet")
_BETWEEN = "|"
_SPLITS = {"train": "train", "test": "test", "val": "test", "validation": "test", "": ""}


@dataclass(frozen=True)
class Row:
    """What a manifest says of one image.

    Attributes:
        image: path of the file.
        labels: with their confidences, from 0 to 1, in the table's order.
        subsets: that it belongs to.
        split: `train`, `test`, or empty where the table does not say.
    """

    image: str
    labels: tuple[tuple[str, float], ...]
    subsets: frozenset[str]
    split: str

    @property
    def best(self) -> str:
        """The label of the highest confidence; of equals the first."""
        return max(self.labels, key=lambda entry: entry[1])[0]


def read_manifest(path: Path) -> list[Row]:
    """Reads a manifest.

    Args:
        path: ending in .csv, .tsv (tabs) or .parquet (which takes the package pyarrow).

    Raises:
        RequestError: it cannot be read, or a line of it says nothing that makes sense.
    """
    rows = _parquet(path) if path.suffix.lower() == ".parquet" else _text(path)
    found = [_row(path, number, entry) for number, entry in enumerate(rows, start=1)]
    if not found:
        raise RequestError(f"{path} lists no images: give it lines below its heading")
    if len({bool(row.split) for row in found}) > 1:
        raise RequestError(
            f"{path} says of some images which split they are in, and not of others: say it of all"
        )
    return found


def _text(path: Path) -> Iterable[Mapping[str, Any]]:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file, delimiter=delimiter))
    except OSError as error:
        raise RequestError(f"the manifest {path} cannot be read ({error.strerror}): name another") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise RequestError(f"the manifest {path} is no table of text in UTF-8 ({error})") from None


def _parquet(path: Path) -> Iterable[Mapping[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise RequestError(
            f"reading {path} takes the package pyarrow: install it, or give a CSV file"
        ) from None
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
    """Splits `a|b`; a list, as Parquet has them, is taken as it is."""
    given = value if isinstance(value, list | tuple) else str("" if value is None else value).split(_BETWEEN)
    return [text for part in given if (text := str(part).strip())]


def _confidences(where: str, value: Any, labels: int) -> list[float]:
    try:
        given = [float(part) for part in _parts(value)] or [1.0]
    except ValueError:
        raise RequestError(f"{where}: confidence {value!r} is no number: write 0.8, or 0.8|0.3") from None
    given = given * labels if len(given) == 1 else given
    if len(given) != labels or not all(0 <= each <= 1 for each in given):
        raise RequestError(
            f"{where}: {labels} labels need as many confidences, from 0 to 1 (given {value!r})"
        )
    return given

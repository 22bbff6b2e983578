"""A manifest: image files anywhere, with weak labels in a table; see `polyrhythm.data.files.manifest`.

B. Jou and others, "Visual affect around the world" (MVSO), ACM Multimedia 2015, arXiv:1508.03868, whose adjective-noun
pairs come with subsets of different trust (tag-restricted, tag-pool); trained on by V. Campos and others, ICCS 2017.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field

from polyrhythm.data.dataset import Dataset
from polyrhythm.data.dealing.hold_out import held_out
from polyrhythm.data.files.duplicates import duplicates
from polyrhythm.data.files.manifest import Row, read_manifest
from polyrhythm.data.pictures.image_checks import find_unreadable
from polyrhythm.data.pictures.image_folder import ImageFileSplit, unreadable
from polyrhythm.data.pictures.images import CENTRAL_SHARE
from polyrhythm.data.pictures.normalization import NORMALIZATIONS, Pixels
from polyrhythm.errors import RequestError, unknown
from polyrhythm.specs import Config

DEFAULT_EPOCHS = 20
Labelled = list[tuple[str, str]]
"""Paths, each with a label."""

_log = logging.getLogger(__name__)


class Manifest(Config):
    """A table of image files and their labels.

    Attributes:
        file: the table, ending in .csv, .tsv or .parquet.
        subset: only images of this subset, in training and test; empty: all. Classes are those of the whole table, so
            that a network trained on one subset can be tested on another.
        labels: `best` learns an image's most confident label, `every` each of them, as often as there are. Test images
            have their best.
        min_confidence: labels below it are left out.
        duplicates: what becomes of a training image whose very bytes are a test image too: `drop` it, `keep` it, or
            `refuse` the data. It is reported in any case.
        image_size: in pixels, of the square that every image becomes.
        skip_unreadable: leave out images that are missing or broken, and test images of classes that training lacks.
        pixels: how they are normalised: `imagenet`, or `centred`, (x - 127) / 128.
        shown: the share of a picture's shorter side that this square has in its middle.
    """

    file: str
    subset: str = ""
    labels: Literal["best", "every"] = "best"
    min_confidence: float = Field(default=0.0, ge=0, le=1)
    duplicates: Literal["drop", "keep", "refuse"] = "drop"
    image_size: int = Field(default=224, ge=1)
    skip_unreadable: bool = False
    pixels: Pixels = "imagenet"
    shown: float = Field(default=CENTRAL_SHARE, gt=0, le=1)

    def load(self) -> Dataset:
        """Reads the table and checks its images.

        Raises:
            RequestError: no such table or subset, images that are missing or broken, labels that only test images have,
                or duplicates, where they are refused.
        """
        rows = self._confident(read_manifest(Path(self.file).expanduser()))
        classes = tuple(
            sorted({label for row in rows if row.split != "test" for label, _ in self._learned(row)})
        )
        rows = self._of_subset(rows)
        skipped = self._unreadable(rows)
        left = [row for row in rows if row.image not in skipped]
        if len(classes) < 2:
            raise RequestError(
                f"{self.file} has {len(classes)} class for training: a classifier needs at least two"
            )
        train, test = self._parts(left, classes)
        train = self._without_duplicates(train, test)
        if not train or not test:
            raise RequestError(
                f"{self.file} leaves {len(train)} training and {len(test)} test images: add some"
            )
        return self._dataset(train, test, classes, tuple(skipped))

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
            raise unknown("subset", self.subset, {name for row in rows for name in row.subsets} or {"(none)"})
        return kept

    def _learned(self, row: Row) -> tuple[tuple[str, float], ...]:
        return row.labels if self.labels == "every" else ((row.best, 1.0),)

    def _unreadable(self, rows: list[Row]) -> dict[str, str]:
        found = find_unreadable(list(dict.fromkeys(row.image for row in rows)))
        if found and not self.skip_unreadable:
            path, reason = next(iter(found.items()))
            raise unreadable(path, reason, len(found) - 1)
        return found

    def _parts(self, rows: list[Row], classes: tuple[str, ...]) -> tuple[Labelled, Labelled]:
        if not any(row.split for row in rows):
            labels = torch.tensor([classes.index(row.best) for row in rows])
            train, test = ([rows[i] for i in part.tolist()] for part in held_out(labels))
        else:
            train = [row for row in rows if row.split == "train"]
            test = [row for row in rows if row.split == "test"]
        learned = [(row.image, label) for row in train for label, _ in self._learned(row)]
        return learned, self._known([(row.image, row.best) for row in test], classes)

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
        self, train: Labelled, test: Labelled, classes: tuple[str, ...], skipped: tuple[str, ...]
    ) -> Dataset:
        learn, check = (
            ImageFileSplit(
                [path for path, _ in part],
                torch.tensor([classes.index(label) for _, label in part], dtype=torch.int64),
                self.image_size,
                self.pixels,
                self.shown,
            )
            for part in (train, test)
        )
        shape = (3, self.image_size, self.image_size)
        black, white = (NORMALIZATIONS[self.pixels].of_tone(tone) for tone in (0, 255))
        return Dataset(
            str(self) if self.subset else self.file,
            learn,
            check,
            classes,
            shape,
            DEFAULT_EPOCHS,
            skipped,
            black,
            white,
            self.shown,
        )


def _report(count: int, found: dict[str, str], outcome: str) -> None:
    if count:
        path, other = next(iter(found.items()))
        _log.warning(
            "%d training images are test images too, such as %s (%s): %s", count, path, other, outcome
        )

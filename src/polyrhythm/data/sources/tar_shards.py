"""Tar shards in the form of WebDataset, for more files than a file system handles well: `key.jpg` next to `key.cls`.

A. Aizman, G. Maltby, T. Breuel, "High performance I/O for large scale deep learning", IEEE Big Data 2019,
arXiv:2001.01858.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from glob import glob
from io import BytesIO
from pathlib import Path
from typing import IO

import torch
from pydantic import Field

from polyrhythm.data.dataset import Dataset, normal
from polyrhythm.data.dealing import held_out_by_name
from polyrhythm.data.image_files import ImageSource, sample
from polyrhythm.data.shards import Reading, Record, ShardSplit, TarIndex, index_shards
from polyrhythm.errors import RequestError
from polyrhythm.user_files import check_is_file

_log = logging.getLogger(__name__)


class TarShards(ImageSource):
    """Tar files of images.

    Attributes:
        files: paths of the shards, with `*` for any text, such as `photos/train-*.tar`, or numbers in braces,
            `photos/train-{000000..000146}.tar`.
        test: paths of the test shards; empty: a fifth of every class is held out.
        buffer: records that each worker holds back to draw from. It holds their positions, not their images.
        bad_records: number of records that may be skipped, in each process, before the run ends.
        skip_unreadable: whether to skip unreadable records, any number of them.
    """

    files: str
    test: str = ""
    buffer: int = Field(default=1000, ge=1)
    bad_records: int = Field(default=100, ge=0)

    def encoded(self) -> Iterable[IO[bytes]]:
        shards = _found(self.files)
        for record in sample(index_shards(shards).records):
            with suppress(OSError):
                yield BytesIO(record.read(shards))

    def load(self) -> Dataset:
        """List the records, which are decoded later, batch by batch, and leave out broken test images.

        Raises:
            RequestError: no such files, too many invalid records, one class only, or test classes that training lacks.
        """
        shards, test_shards = _found(self.files), _found(self.test) if self.test else []
        train, test = index_shards(shards), index_shards(test_shards)
        self._check_faults(train, test)
        classes = _classes({normal(record.label) for record in train.records})
        strange = sorted({normal(record.label) for record in test.records} - set(classes))
        if strange:
            raise RequestError(f"{self.test} has classes that {self.files} lacks ({', '.join(strange[:5])})")
        if len(classes) < 2:
            raise RequestError(f"{self.files} holds {len(classes)} class: a classifier needs at least two")
        learn, check = list(train.records), list(test.records)
        held_out = not test_shards
        if held_out:
            labels = torch.tensor([classes.index(normal(record.label)) for record in learn])
            parts = held_out_by_name(_names(shards, learn), labels, self._dealt)
            learn, check = ([learn[i] for i in part.tolist()] for part in parts)
            test_shards = shards
        tested = self._split(test_shards, check, classes).whole_only()
        names = _names(shards, learn), _names(test_shards, tested.records)
        return self._dataset(self._split(shards, learn, classes), tested, classes, names, held_out=held_out)

    def _check_faults(self, *indices: TarIndex) -> None:
        faults = [line for index in indices for line in index.faults]
        if len(faults) > self.bad_records and not self.skip_unreadable:
            raise RequestError(
                f"{len(faults)} bad records, such as {faults[0]}: repair them, or give a higher bad_records"
            )
        if faults:
            _log.warning("%d bad records are skipped, such as %s", len(faults), faults[0])

    def _split(self, shards: list[Path], records: list[Record], classes: Sequence[str]) -> ShardSplit:
        most = None if self.skip_unreadable else self.bad_records
        number = {name: place for place, name in enumerate(classes)}
        labels = torch.tensor([number[normal(record.label)] for record in records], dtype=torch.int64)
        reading = Reading(
            image_size=self.image_size,
            pixels=self.pixels,
            buffer=self.buffer,
            bad_records=most,
            shown=self.shown,
        )
        return ShardSplit(shards, records, labels, reading)

    def _dataset(
        self,
        train: ShardSplit,
        test: ShardSplit,
        classes: tuple[str, ...],
        names: tuple[list[str], list[str]],
        *,
        held_out: bool,
    ) -> Dataset:
        if not len(train) or not len(test):
            raise RequestError(
                f"{self.files} leaves {len(train)} training and {len(test)} test images: add some"
            )
        return self.dataset(str(self), train, test, classes, names=names, held_out=held_out)


def _names(shards: Sequence[Path], records: Iterable[Record]) -> list[str]:
    """Return the names of records: those in their shard, below the name of its file."""
    return [normal(f"{shards[record.shard].name}/{record.name}") for record in records]


def _found(pattern: str) -> list[Path]:
    found = [Path(path) for one in _braced(str(Path(pattern).expanduser())) for path in sorted(glob(one))]
    for path in found:
        check_is_file(path, "the shard")
    if not found:
        raise RequestError(
            f"there are no shards {pattern}: name tar files, with * for any text, or {{000..146}} for numbers"
        )
    return found


def _braced(pattern: str) -> list[str]:
    """Write out the first numbers in braces, `{000..146}`, and those after it, each as wide as its first one."""
    span = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if span is None:
        return [pattern]
    first, last = span[1], span[2]
    numbers = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    before, after = pattern[: span.start()], pattern[span.end() :]
    return [found for number in numbers for found in _braced(before + number + after)]


def _classes(names: set[str]) -> tuple[str, ...]:
    """Return class names sorted; numbers by their value."""
    return tuple(sorted(names, key=lambda name: (int(name), "") if name.isdecimal() else (-1, name)))

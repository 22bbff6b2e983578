"""Folders of image files: their classes and files, and a split that decodes them on demand.

Unreadable images are found before a run starts; the results of long checks are kept in the user's cache.
"""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import IO, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PrivateAttr
from torch import Tensor

from polyrhythm.data.dataset import Dataset, ExcludedFiles, Split, UnreadableFiles, normal
from polyrhythm.data.dealing import Dealt
from polyrhythm.data.images import (
    CENTRAL_SHARE,
    NORMALIZATIONS,
    Pixels,
    UnreadableImage,
    bomb_warnings_are_errors,
    check,
    read_pixels,
    read_whole,
    suffixes,
)
from polyrhythm.data.user_cache import cache_folder, write_whole
from polyrhythm.errors import RequestError, printable
from polyrhythm.specs import Config, Spec

Decoder = Callable[[str], NDArray[np.uint8]]
DEFAULT_EPOCHS = 20

_log = logging.getLogger(__name__)


class ImageSource(Config):
    """Common base of all sources of encoded images.

    Attributes:
        image_size: side of the square that every image becomes, in pixels.
        skip_unreadable: leave out images that cannot be read, instead of refusing the data.
        pixels: normalization, `imagenet` or `centered`: (x - 127) / 128.
        shown: side of this square, in the center, as a share of an image's shorter side.
    """

    image_size: int = Field(default=224, ge=1)
    skip_unreadable: bool = False
    pixels: Pixels = "imagenet"
    shown: float = Field(default=CENTRAL_SHARE, gt=0, le=1)
    _dealt: Dealt = PrivateAttr(default=None)

    def dealt_as(self, before: Dealt) -> Self:
        """Return the same source with the earlier assignment to training and test images."""
        made = self.model_copy()
        made._dealt = before
        return made

    def encoded(self) -> Iterable[str | IO[bytes]]:
        """Return a sample of the training images, and perhaps of held-out ones: paths, or open files.

        Raises:
            RequestError: the images cannot be listed.
        """
        raise NotImplementedError

    def spec(self) -> Spec:
        """Return the spec, first where the images are: that is what a subclass requires."""
        found, fields = super().spec(), type(self).model_fields
        required_first = sorted(found.arguments.items(), key=lambda entry: not fields[entry[0]].is_required())
        return Spec(found.name, dict(required_first))

    def of_files(self, paths: Sequence[str], labels: Tensor) -> ImageFileSplit:
        """Return labeled image files as a split."""
        return ImageFileSplit(
            paths, labels, self.image_size, self.pixels, self.shown, skip_unreadable=self.skip_unreadable
        )

    def dataset(
        self,
        name: str,
        train: Split,
        test: Split,
        classes: tuple[str, ...],
        skipped: tuple[str, ...] = (),
        *,
        names: tuple[Sequence[str], Sequence[str]] | None = None,
        held_out: bool = False,
        left_out: tuple[ExcludedFiles, ...] = (),
    ) -> Dataset:
        """Return two splits of such images as a data set; for the other arguments see `Dataset`."""
        black, white = (NORMALIZATIONS[self.pixels].of_tone(tone) for tone in (0, 255))
        shape = (3, self.image_size, self.image_size)
        return Dataset(
            name,
            train,
            test,
            classes,
            shape,
            DEFAULT_EPOCHS,
            skipped,
            black,
            white,
            self.shown,
            None if names is None else (tuple(names[0]), tuple(names[1])),
            held_out,
            left_out,
        )

    def refuse_unreadable(self, paths: Sequence[str]) -> tuple[str, ...]:
        """Return the files that cannot be read; raise `RequestError` for them unless they may be left out."""
        found = find_unreadable(paths)
        if found and not self.skip_unreadable:
            path, reason = next(iter(found.items()))
            raise unreadable(path, reason, len(found) - 1)
        return tuple(found)


class ImageFileSplit:
    """Labeled image files, decoded a batch at a time by as many threads as torch may use.

    Every method raises `RequestError` for a file that cannot be read, `UnreadableFiles` where it may be left out.

    Args:
        files: paths.
        labels: (n,) int64.
        image_size: side of the square that is made of each image, in pixels.
        pixels: normalization.
        shown: side of this square in an image, as a share of its shorter side.
        skip_unreadable: whether files that cannot be read may be left out.
    """

    def __init__(
        self,
        files: Sequence[str],
        labels: Tensor,
        image_size: int,
        pixels: Pixels = "imagenet",
        shown: float = CENTRAL_SHARE,
        *,
        skip_unreadable: bool = False,
    ) -> None:
        self.files = files
        self.image_size = image_size
        self.shown = shown
        self.labels = labels
        self._normalization = NORMALIZATIONS[pixels]
        self._skips = skip_unreadable
        self._unreadable: dict[int, str] = {}
        self._left_out: list[str] = []

    def newly_left_out(self) -> tuple[str, ...]:
        """Return the files that could not be read since the last call, and were left out."""
        found, self._left_out = tuple(sorted(self._left_out)), []
        return found

    def __len__(self) -> int:
        return len(self.files)

    def images(self, indices: Tensor) -> Tensor:
        """Return (B, 3, size, size) float32, normalized."""
        return self.normalized(self.decoded(indices))

    def decoded(self, indices: Tensor) -> Tensor:
        """Return (B, size, size, 3) uint8."""
        if len(indices) == 0:
            return torch.empty(0, self.image_size, self.image_size, 3, dtype=torch.uint8)
        return torch.from_numpy(
            np.stack(self._read(indices, partial(read_pixels, image_size=self.image_size, share=self.shown)))
        )

    def normalized(self, decoded: Tensor) -> Tensor:
        """Return (B, 3, size, size) float32 in new memory."""
        return self._normalization(decoded)

    def whole(self, indices: Tensor, shorter_side: int) -> list[Tensor]:
        """Return whole images, (3, H, W) float32 each, with `shorter_side` pixels on their shorter side."""
        pixels = self._read(indices, partial(read_whole, shorter_side=shorter_side))
        return [self._normalization(torch.from_numpy(np.array(each))[None])[0] for each in pixels]

    def _read(self, indices: Tensor, decode: Decoder) -> list[NDArray[np.uint8]]:
        numbers = indices.tolist()
        with ThreadPoolExecutor(max(1, min(len(numbers), torch.get_num_threads()))) as threads:
            decoded = list(threads.map(partial(self._pixels, decode=decode), numbers))
        found = [pixels for pixels in decoded if not isinstance(pixels, str)]
        if len(found) == len(decoded):
            return found
        bad = {
            number: reason for number, reason in zip(numbers, decoded, strict=True) if isinstance(reason, str)
        }
        number, reason = next(iter(bad.items()))
        error = unreadable(self.files[number], reason, len(bad) - 1)
        if not self._skips:
            raise error
        for number in bad.keys() - self._unreadable.keys():
            _log.warning("%s cannot be read (%s): left out", printable(self.files[number]), bad[number])
        self._left_out += [self.files[number] for number in bad.keys() - self._unreadable.keys()]
        self._unreadable |= bad
        raise UnreadableFiles(str(error), bad)

    def _pixels(self, number: int, decode: Decoder) -> NDArray[np.uint8] | str:
        """Return an image, or why it cannot be read."""
        known = self._unreadable.get(number)
        if known is not None:
            return known
        try:
            return decode(self.files[number])
        except UnreadableImage as error:
            return str(error)


_SAMPLE = 64
Entry = TypeVar("Entry")


def sample(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Return about 64 of the entries, at equal distances."""
    return entries[:: max(1, len(entries) // _SAMPLE)]


def unreadable(path: str, reason: str, others: int = 0) -> RequestError:
    """Return the error for an unreadable image, and `others` more."""
    more = f", and {others} more cannot" if others else ""
    return RequestError(
        f"{path} cannot be read ({reason}){more}: repair or remove it, "
        "or leave such images out with --skip-unreadable"
    )


@dataclass
class Listing:
    """Image files by class, and what else a folder holds.

    Attributes:
        classes: paths of the images of each class, sorted.
        other_files: paths of files that are no images by their endings.
        hidden: paths of hidden files and folders.
        loose: paths of files next to the classes' folders.
        links: paths of links to folders inside a class.
    """

    classes: dict[str, list[str]] = field(default_factory=dict)
    other_files: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    loose: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)


def list_folder(folder: Path) -> Listing:
    """Return the image files `folder/<class>/**/*` of every class, and the skipped entries.

    Names of classes are in Unicode's form NFC; folders with equal names then are one class. Links are followed,
    except to folders inside a class.

    Raises:
        RequestError: the folder or one inside it cannot be listed.
    """
    found = Listing()
    classes: dict[str, list[str]] = defaultdict(list)
    try:
        for entry in sorted(folder.iterdir()):
            if _hidden(entry.name):
                found.hidden.append(str(entry))
            elif entry.is_dir():
                classes[normal(entry.name)] += _walked(entry, found)
            else:
                found.loose.append(str(entry))
    except OSError as error:
        raise RequestError(
            f"{error.filename} cannot be listed ({error.strerror}): give a folder of images"
        ) from None
    found.classes = {name: sorted(classes[name]) for name in sorted(classes)}
    return found


def list_images(folder: Path) -> dict[str, list[str]]:
    """Return the image files of every class, sorted by name; see `list_folder`."""
    return list_folder(folder).classes


def image_files(folder: Path) -> list[str]:
    """Return all image files `folder/**/*`, sorted by name.

    Hidden files and folders (`.name`) and files without an image suffix are ignored. Links to files are followed.
    """
    return sorted(_walked(folder, Listing()))


def _walked(folder: Path, listing: Listing) -> list[str]:
    """Return the image files of a folder, and note what else there is."""
    found = []
    for place, folders, names in os.walk(folder, onerror=_raise):
        listing.hidden += [os.path.join(place, name) for name in [*folders, *names] if _hidden(name)]
        folders[:] = [name for name in folders if not _hidden(name)]
        listing.links += [path for name in folders if os.path.islink(path := os.path.join(place, name))]
        shown = [name for name in names if not _hidden(name)]
        found += [os.path.join(place, name) for name in shown if _is_image(name)]
        listing.other_files += [os.path.join(place, name) for name in shown if not _is_image(name)]
    return found


def relative_names(files: Iterable[str], folder: Path) -> list[str]:
    """Return the paths of files relative to a folder, with `/`, in Unicode's form NFC."""
    start = f"{folder}{os.sep}"
    below = (
        path[len(start) :] if path.startswith(start) else os.path.relpath(path, folder) for path in files
    )
    return [normal(path.replace(os.sep, "/")) for path in below]


def _raise(error: OSError) -> None:
    raise error


def _hidden(name: str) -> bool:
    return name.startswith(".")


def _is_image(name: str) -> bool:
    return not _hidden(name) and os.path.splitext(name)[1].lower() in suffixes()


DECODE_UP_TO = 20_000
REMEMBER_AFTER_S = 2.0


def find_unreadable(files: Sequence[str], remember_after_s: float = REMEMBER_AFTER_S) -> dict[str, str]:
    """Check images in parallel threads; return the reason for each unreadable one, in the order of `files`.

    Up to 20,000 files are decoded completely, which detects truncated ones; of more files only headers are read, and a
    truncated image is found when its batch is made (`ImageFileSplit`). Results of checks longer than `remember_after_s`
    seconds are kept in the user's cache, keyed by paths, sizes and times of the files.
    """
    memory = cache_folder() / "checked" / f"{_fingerprint(files)}.json"
    known = _recalled(memory)
    if known is not None:
        return known
    start = time.monotonic()
    found = _check_all(files)
    if time.monotonic() - start > remember_after_s:
        _remember(memory, found)
    return found


def _check_all(files: Sequence[str]) -> dict[str, str]:
    one = partial(check, whole=len(files) <= DECODE_UP_TO)
    # Warning filters belong to the process, so they are set here once and not in the threads.
    with warnings.catch_warnings(), ThreadPoolExecutor(torch.get_num_threads()) as threads:
        bomb_warnings_are_errors()
        reasons = threads.map(one, files)
        return {path: reason for path, reason in zip(files, reasons, strict=True) if reason is not None}


def _fingerprint(files: Sequence[str]) -> str:
    digest = sha256()
    for path in files:
        status = os.stat(path) if os.path.exists(path) else None
        stamp = (status.st_size, status.st_mtime_ns) if status else None
        digest.update(os.fsencode(path) + repr(stamp).encode() + b"\0")
    return digest.hexdigest()


def _recalled(memory: Path) -> dict[str, str] | None:
    try:
        found = json.loads(memory.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _remember(memory: Path, found: dict[str, str]) -> None:
    try:
        write_whole(memory, json.dumps(found).encode())
    except OSError:
        # Only speed is lost.
        return

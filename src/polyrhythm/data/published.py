"""Data sets in the files that their authors publish: the idx files of the MNIST family, CIFAR's and STL-10's, SVHN's.

    MNIST family   train-images-idx3-ubyte, …   see `sources.fashion_mnist`
    CIFAR          data_batch_1.bin …           records of one or two label bytes and 3,072 pixels
    STL-10         train_X.bin, train_y.bin     3 x 96 x 96 bytes each, column by column; labels from 1
    SVHN           train_32x32.mat              MATLAB: X (32, 32, 3, n), y (n, 1), where 10 stands for 0

Pixels stay bytes, and are normalized by mean and standard deviation of the training pixels. CIFAR's version for Python
consists of pickles, which can execute anything, so its binary version is read.
"""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from torch import Tensor

from polyrhythm.data.dataset import Dataset, TensorSplit
from polyrhythm.data.user_cache import cache_folder, write_whole
from polyrhythm.errors import RequestError
from polyrhythm.fetched_file import fetched

Labelled = tuple[Tensor, Tensor]
"""Images (n, C, H, W) uint8, and their labels (n,)."""

_MEASURED = 10_000
"""Training images from which mean and standard deviation are taken."""


def dataset_of(name: str, train: Labelled, test: Labelled, classes: Sequence[str], epochs: int) -> Dataset:
    """Return images of bytes as a data set; raise `RequestError` for labels beyond the classes."""
    for images, labels in (train, test):
        if len(images) != len(labels) or not len(labels):
            raise RequestError(
                f"{name} has {len(images)} images and {len(labels)} labels: fetch its files again"
            )
        if not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
            raise RequestError(f"{name} has labels beyond its {len(classes)} classes: fetch its files again")
    some = train[0][:_MEASURED].double()
    mean, std = float(some.mean()), max(float(some.std(correction=0)), 1.0)
    learn, check = (TensorSplit(images, labels, mean, std) for images, labels in (train, test))
    channels, height, width = train[0].shape[1:]
    black, white = (-mean / std,), ((255 - mean) / std,)
    return Dataset(
        name, learn, check, tuple(classes), (channels, height, width), epochs, black=black, white=white
    )


@dataclass(frozen=True)
class Origin:
    """Download addresses of the files of a data set.

    Attributes:
        addresses: URLs, each with the MD5 of its content.
        members: names of the files that are needed of archives (.tar.gz, .zip); empty: files are there as they are.
    """

    addresses: tuple[tuple[str, str], ...]
    members: tuple[str, ...] = ()


def folder_of(given: str | None, what: str, origin: Origin) -> Path:
    """Return the folder of a data set's files; where none is given, the user's cache, into which they are fetched once.

    Raises:
        RequestError: the files cannot be fetched, or differ from the known ones.
    """
    if given is not None:
        return Path(given).expanduser()
    folder = cache_folder() / what
    if origin.members and all((folder / name).is_file() for name in origin.members):
        return folder
    try:
        for address, checksum in origin.addresses:
            path = folder / address.rpartition("/")[2]
            fetched(address, path, checksum, kind="md5", what="the file")
            if origin.members:
                _unpack(path, origin.members, folder)
    except RequestError as error:
        raise RequestError(f"{error}; or name the folder of all its files, {what}=FOLDER") from None
    return folder


def _unpack(archive: Path, names: Sequence[str], into: Path) -> None:
    """Write files of an archive into a folder, whatever folders they have there, and remove the archive."""
    try:
        for name, content in _members(archive, names):
            write_whole(into / name, content)
        archive.unlink()
    except (OSError, EOFError, tarfile.TarError, BadZipFile) as error:
        raise RequestError(f"{archive} cannot be unpacked ({error})") from None


def _members(archive: Path, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".zip":
        with ZipFile(archive) as opened:
            for entry in opened.infolist():
                if (name := Path(entry.filename).name) in names:
                    yield name, opened.read(entry)
        return
    with tarfile.open(archive) as shelf:
        for member in shelf:
            file = shelf.extractfile(member) if Path(member.name).name in names else None
            if file is not None:
                yield Path(member.name).name, file.read()


def found_in(root: Path, what: str, name: str) -> Path:
    """Return a file, or the same with `.gz`, anywhere in a folder; raise `RequestError` if it is not there."""
    for each in (name, f"{name}.gz"):
        found = next((path for path in [root / each, *sorted(root.rglob(each))] if path.is_file()), None)
        if found is not None:
            return found
    raise RequestError(f"{what} needs the file {name}, which is not in {root}: put it there, gzipped or not")


def content_of(path: Path) -> bytes:
    """Return a file's bytes, uncompressed; raise `RequestError` if it cannot be read."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, ValueError) as error:
        raise RequestError(f"{path} cannot be read ({error}): fetch it again") from None


def records(content: bytes, path: Path, labels: int, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Return the images (n, C, H, W) of records, each some label bytes and an image, and the labels (n, `labels`)."""
    size = labels + shape[0] * shape[1] * shape[2]
    if not content or len(content) % size:
        raise RequestError(f"{path} is no file of records of {size} bytes: fetch it again")
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, size)
    return rows[:, labels:].reshape(-1, *shape), rows[:, :labels].long()


def matlab(path: Path) -> Labelled:
    """Return the images and labels of an SVHN file, 10 being the digit 0."""
    from scipy.io import loadmat

    try:
        found = loadmat(path, variable_names=["X", "y"])
        images = torch.from_numpy(np.ascontiguousarray(found["X"].transpose(3, 2, 0, 1)))
        return images, torch.from_numpy(found["y"].astype(np.int64)).flatten() % 10
    except Exception as error:  # as above
        raise RequestError(f"{path} cannot be read ({error}): fetch it again") from None

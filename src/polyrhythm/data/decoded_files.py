"""Image files that were decoded and scaled once, stored as bytes on disk for this run and later ones.

    FOLDER/<key>/checksums          a CRC-32 of each image, 4 bytes each
                 00000.pixels …     the images' bytes, one after the other, up to 256 MiB a file

The key is a hash of every file's path, size and modification time, of the image size, and of the decoder; any change
makes a new one. A folder appears complete or not at all. An image that does not match its checksum is decoded
again.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyrhythm.data.dataset import read_readable
from polyrhythm.data.image_files import ImageFileSplit
from polyrhythm.errors import RequestError

_FORMAT = 1
_FILE_BYTES = 256 << 20
_AT_ONCE = 64
_CHECKSUMS = "checksums"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)

_log = logging.getLogger(__name__)


class DecodedFiles:
    """Labeled image files, read from the stored bytes in `folder`; see `Decoding`."""

    def __init__(self, files: ImageFileSplit, folder: Path) -> None:
        self.source = files
        self.labels = files.labels
        self._folder = folder
        self._checksums = np.fromfile(folder / _CHECKSUMS, dtype="<u4")
        self._sound = np.zeros(len(files), dtype=np.bool_)
        self._open: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.source)

    def images(self, indices: Tensor) -> Tensor:
        """Return the images of `indices`, (B,) int64, as (B, 3, size, size) float32, normalized."""
        return self.normalized(self.decoded(indices))

    def decoded(self, indices: Tensor) -> Tensor:
        """Return the bytes (B, size, size, 3) uint8; damaged ones are decoded from their files again."""
        side = self.source.image_size
        found = np.empty((len(indices), side, side, 3), dtype=np.uint8)
        damaged = [row for row, index in enumerate(indices.tolist()) if not self._read(index, found[row])]
        if damaged:
            found[damaged] = self.source.decoded(indices[damaged]).numpy()
        return torch.from_numpy(found)

    def normalized(self, decoded: Tensor) -> Tensor:
        """Return (B, 3, size, size) float32 in new memory."""
        return self.source.normalized(decoded)

    def whole(self, indices: Tensor, shorter_side: int) -> list[Tensor]:
        """Return the whole images of `indices`, decoded from their files."""
        return self.source.whole(indices, shorter_side)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}

    def _read(self, index: int, row: NDArray[np.uint8]) -> bool:
        """Read an image into `row`; return whether it is undamaged, which each process checks once."""
        number, place = divmod(index, _images_a_file(self.source.image_size))
        try:
            count = os.preadv(self._descriptor(number), [row.data], place * row.nbytes)
        except OSError:
            return False
        if count == row.nbytes and not self._sound[index]:
            self._sound[index] = zlib.crc32(row.data) == int(self._checksums[index])
        return count == row.nbytes and bool(self._sound[index])

    def _descriptor(self, number: int) -> int:
        if number not in self._open:
            self._open[number] = os.open(self._folder / _file_name(number), os.O_RDONLY | os.O_CLOEXEC)
        return self._open[number]


def keep_decoded(split: ImageFileSplit, folder: str | Path) -> DecodedFiles:
    """Return a split that reads decoded images from a folder, into which missing ones are decoded first.

    Raises:
        RequestError: an image cannot be read, or the folder cannot be written or has too little room.
    """
    root = Path(folder).expanduser()
    found = root / files_digest(split)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _alone(root):
            if not _is_whole(found, split):
                _decode_into(found, split)
            return DecodedFiles(split, found)
    except OSError as error:
        raise RequestError(
            f"decoded images cannot be kept in {root} ({error.strerror or error}): choose another folder with --decoded"
        ) from None


def _decode_into(found: Path, split: ImageFileSplit) -> None:
    size = len(split) * _image_bytes(split.image_size)
    free = shutil.disk_usage(found.parent).free
    if free < size:
        raise RequestError(
            f"decoded images take {size / 1e9:.1f} GB, and {found.parent} has {free / 1e9:.1f} GB left: choose another "
            "folder with --decoded"
        )
    _log.warning("decoding %d images once into %s (%.2f GB)", len(split), found.parent, size / 1e9)
    shutil.rmtree(found, ignore_errors=True)
    part = Path(mkdtemp(dir=found.parent, prefix=f".{found.name}."))
    try:
        _write(part, split)
        try:
            part.replace(found)
        except OSError:
            if not _is_whole(found, split):  # else another host, where no lock holds, has been sooner
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write(part: Path, split: ImageFileSplit) -> None:
    a_file = _images_a_file(split.image_size)
    # Threads suffice: Pillow releases the interpreter lock while it decodes.
    checksums = []
    with ThreadPoolExecutor(_cores()) as threads:
        for number, start in enumerate(range(0, len(split), a_file)):
            stop = min(start + a_file, len(split))
            pieces = [range(at, min(at + _AT_ONCE, stop)) for at in range(start, stop, _AT_ONCE)]
            with open(part / _file_name(number), "wb") as file:
                for pixels, is_read in threads.map(partial(_pixels, split), pieces):
                    file.write(pixels.data)
                    sums = [zlib.crc32(row.data) for row in pixels]
                    # A checksum that does not match sends readers to the file, which may be left out.
                    checksums += [each ^ (not good) for each, good in zip(sums, is_read, strict=True)]
    np.array(checksums, dtype="<u4").tofile(part / _CHECKSUMS)


def _pixels(split: ImageFileSplit, piece: Sequence[int]) -> tuple[NDArray[np.uint8], list[bool]]:
    """Return images (B, size, size, 3), and whether each could be read."""
    indices = torch.tensor(piece)
    readable, decoded = read_readable(split.decoded, indices)
    if len(readable) == len(indices):
        return decoded.numpy(), [True] * len(indices)
    there = torch.isin(indices, readable)
    pixels = torch.zeros(len(indices), *decoded.shape[1:], dtype=torch.uint8)
    pixels[there] = decoded
    return pixels.numpy(), there.tolist()


def _is_whole(folder: Path, split: ImageFileSplit) -> bool:
    """Whether all files exist with their full length."""
    a_file, image_bytes = _images_a_file(split.image_size), _image_bytes(split.image_size)
    sizes = {_CHECKSUMS: 4 * len(split)}
    for number, start in enumerate(range(0, len(split), a_file)):
        sizes[_file_name(number)] = min(a_file, len(split) - start) * image_bytes
    return all(_size(folder / name) == size for name, size in sizes.items())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def files_digest(split: ImageFileSplit) -> str:
    """Return a hash of the files' paths, sizes and times, and of how they are decoded."""
    digest = sha256(repr((_FORMAT, split.image_size, split.shown, PIL.__version__)).encode())
    for path in split.files:
        status = os.stat(path) if os.path.exists(path) else None
        stamp = (status.st_size, status.st_mtime_ns) if status else None
        digest.update(os.fsencode(os.path.abspath(path)) + repr(stamp).encode() + b"\0")
    return digest.hexdigest()[:32]


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Hold a lock, so that one process makes what is missing and the others find it.

    Where the file system has none (NFS without its lock server), each makes it, and one of them leaves it there.
    """
    with open(root / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _log.warning("%s has no locks (%s): decoding without", root, error.strerror)
        yield


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _image_bytes(image_size: int) -> int:
    return 3 * image_size * image_size


def _images_a_file(image_size: int) -> int:
    return max(1, _FILE_BYTES // _image_bytes(image_size))


def _file_name(number: int) -> str:
    return f"{number:05d}.pixels"

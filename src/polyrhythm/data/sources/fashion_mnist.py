"""Fashion-MNIST: 60,000 + 10,000 gray images of clothes, 28 by 28 pixels, ten classes.

Paper: H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
Algorithms", 2017, arXiv:1708.07747.

The files are downloaded from a URL, or taken out of a Debian package without root; completely or not at all. They are
verified by sha256, and lie in a folder uncompressed or gzipped. They have the idx format of the MNIST family:

    0 0 type dimensions | size of each dimension, 4 bytes, big-endian | the numbers, last dimension fastest
"""

from __future__ import annotations

import logging
import struct
import subprocess
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import urlopen

import torch

from polyrhythm.data.dataset import Dataset, TensorSplit
from polyrhythm.data.published import content_of, found_in
from polyrhythm.data.user_cache import cache_folder, write_whole
from polyrhythm.errors import RequestError
from polyrhythm.specs import Config

GZIP = 16 + zlib.MAX_WBITS


@dataclass(frozen=True)
class VerifiedFile:
    """A file with known uncompressed length and sha256; `name` is without `.gz`."""

    name: str
    size_bytes: int
    sha256: str

    def unpack(self, packed: bytes, origin: str) -> bytes:
        """Uncompress and verify; raise `RequestError`, which names `origin`, for other content."""
        try:
            # Bounded, so that a hostile file cannot fill the memory.
            content = zlib.decompressobj(GZIP).decompress(packed, self.size_bytes + 1)
        except zlib.error:
            raise RequestError(f"{origin} is damaged (not a whole gzip file): download it again") from None
        return self.verify(content, origin)

    def verify(self, content: bytes, origin: str) -> bytes:
        """Return `content`; raise `RequestError`, which names `origin`, if it is not the expected one."""
        found = sha256(content).hexdigest()
        if found != self.sha256:
            raise RequestError(
                f"{origin} is damaged (sha256 {found[:16]}…, not {self.sha256[:16]}…): download it again"
            )
        return content

    def read(self, folder: Path) -> bytes:
        """Read the file from a folder, uncompressed or gzipped; raise `RequestError` if that fails."""
        plain, packed = folder / self.name, folder / f"{self.name}.gz"
        try:
            if plain.is_file():
                return self.verify(plain.read_bytes(), str(plain))
            return self.unpack(packed.read_bytes(), str(packed))
        except OSError as error:
            reason = error.strerror or str(error)
            raise RequestError(f"{packed} cannot be read ({reason}): put it, or {self.name}, there") from None


def read_all(folder: Path, files: Sequence[VerifiedFile]) -> list[bytes]:
    """Return the contents of `files` in a folder; raise `RequestError` as `VerifiedFile.read`."""
    return [file.read(folder) for file in files]


CONNECT_S = 10.0
DOWNLOAD_S = 300.0
COMMAND_S = 300.0
_CHUNK_BYTES = 1 << 20

_log = logging.getLogger(__name__)


def download(address: str, files: Sequence[VerifiedFile], into: Path) -> None:
    """Download `NAME.gz` of every file from a folder's URL (ending in `/`), verify it and write it.

    Raises:
        RequestError: no connection, too slow, other content, or `into` cannot be written.
    """
    # A warning, because it can take minutes and should not look like a hang.
    _log.warning("fetching %d files from %s", len(files), address)
    for file in files:
        origin = f"{address}{file.name}.gz"
        try:
            packed = _get(origin, file.size_bytes)
            file.unpack(packed, origin)
            write_whole(into / f"{file.name}.gz", packed)
        except (OSError, HTTPException) as error:
            raise RequestError(f"{origin}: {getattr(error, 'reason', None) or error}") from None


def _get(address: str, most_bytes: int) -> bytes:
    give_up_s = time.monotonic() + DOWNLOAD_S
    content = bytearray()
    with urlopen(address, timeout=CONNECT_S) as response:
        while chunk := response.read1(_CHUNK_BYTES):
            content += chunk
            # The gzipped file is smaller than its content; a server that sends more sends something else.
            if len(content) > most_bytes + 1024 or time.monotonic() > give_up_s:
                raise OSError(f"too large or too slow ({len(content)} bytes so far)")
    return bytes(content)


def unpack_debian(package: str, files: Sequence[VerifiedFile], into: Path) -> None:
    """Download a Debian package with apt-get and write verified files of it to a folder; nothing is installed.

    If the system has no package lists, they are downloaded to a temporary folder.

    Raises:
        RequestError: no apt-get, no such package, no connection, too slow, or other content.
    """
    _log.warning("fetching the Debian package %s", package)
    with TemporaryDirectory(prefix="polyrhythm-") as scratch:
        archive = _fetch_archive(package, Path(scratch))
        unpacked = Path(scratch, "unpacked")
        _command(["dpkg-deb", "-x", str(archive), str(unpacked)], Path(scratch))
        first = next(unpacked.rglob(f"{files[0].name}.gz"), None)
        if first is None:
            raise RequestError(f"package {package} does not hold {files[0].name}.gz")
        read_all(first.parent, files)
        try:
            for name in (f"{file.name}.gz" for file in files):
                write_whole(into / name, (first.parent / name).read_bytes())
        except OSError as error:
            raise RequestError(f"{into}: {error}") from None


def _fetch_archive(package: str, scratch: Path) -> Path:
    try:
        _command(["apt-get", "download", package], scratch)
    except RequestError:
        lists, cache = scratch / "lists", scratch / "cache"
        for folder in (lists / "partial", cache / "archives" / "partial"):
            folder.mkdir(parents=True)
        own = ["apt-get", "-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}"]
        _command([*own, "update"], scratch)
        _command([*own, "download", package], scratch)
    archive = next(scratch.glob("*.deb"), None)
    if archive is None:
        raise RequestError(f"apt-get download {package} left no archive")
    return archive


def _command(words: list[str], folder: Path) -> None:
    what = f"{words[0]} {words[-1]}"
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else f"took over {COMMAND_S:.0f} s"
        raise RequestError(f"{what}: {reason}") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RequestError(f"{what}: {lines[-1]}")


def parse_idx(content: bytes) -> torch.Tensor:
    """Return the content of an idx file of unsigned bytes, as uint8 of the file's shape, in new memory.

    Raises:
        ValueError: it is not such a file, or its length does not match its header.
    """
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError("not an idx file of unsigned bytes")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise ValueError("an idx file cut short in its head")
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    if len(content) - start != torch.Size(shape).numel():
        raise ValueError(f"an idx file of {len(content) - start} numbers with the header {shape}")
    return torch.frombuffer(bytearray(memoryview(content)[start:]), dtype=torch.uint8).view(shape)


def idx_part(root: Path, what: str, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images (n, 1, H, W) uint8 and labels (n,) of one of the MNIST family's parts, such as `train`.

    Raises:
        RequestError: a file is missing or damaged.
    """
    found = []
    for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"):
        path = found_in(root, what, f"{part}-{kind}")
        try:
            found.append(parse_idx(content_of(path)))
        except ValueError as error:
            raise RequestError(f"{path} is damaged ({error}): fetch it again") from None
    return found[0].unsqueeze(1), found[1].long()


SYSTEM_FOLDER = Path("/usr/share/datasets/fashion-mnist")
ADDRESS = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
PACKAGE = "dataset-fashion-mnist"

FILES = (
    VerifiedFile(
        "train-images-idx3-ubyte",
        47_040_016,
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    VerifiedFile(
        "train-labels-idx1-ubyte",
        60_008,
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    VerifiedFile(
        "t10k-images-idx3-ubyte",
        7_840_016,
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    VerifiedFile(
        "t10k-labels-idx1-ubyte",
        10_008,
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
)

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

# Statistics of the training images, with pixels from 0 to 1.
MEAN = 0.2860
STD = 0.3530


def _keep(contents: Sequence[bytes], folder: Path) -> None:
    with suppress(OSError):  # it is only for speed
        for file, content in zip(FILES, contents, strict=True):
            write_whole(folder / file.name, content)


class FashionMNIST(Config):
    """Fashion-MNIST.

    Attributes:
        folder: folder with the four idx files, gzipped or not; None: search the system's folder, the cache, the
            web and the Debian package, in this order.
    """

    folder: str | None = None

    def load(self) -> Dataset:
        """Return the data, downloaded first if necessary; pixels are normalized by mean and standard deviation."""
        if self.folder is None:
            contents = find_or_fetch(SYSTEM_FOLDER, cache_folder() / "fashion-mnist", ADDRESS)
        else:
            contents = read_all(Path(self.folder).expanduser(), FILES)
        images, labels, test_images, test_labels = map(parse_idx, contents)
        train = TensorSplit(images.unsqueeze(1), labels, 255 * MEAN, 255 * STD)
        test = TensorSplit(test_images.unsqueeze(1), test_labels, 255 * MEAN, 255 * STD)
        black, white = (-MEAN / STD,), ((1 - MEAN) / STD,)
        return Dataset("fashion-mnist", train, test, CLASSES, (1, 28, 28), 5, black=black, white=white)


def find_or_fetch(system: Path, cache: Path, address: str) -> list[bytes]:
    """Return the contents of `FILES` from the first source that has them all: `system`, `cache`, `address`, Debian.

    They are kept uncompressed in a folder of `cache`: to uncompress them takes as long as a seventh of importing torch.

    Raises:
        RequestError: none has them; with the reasons and what to do.
    """
    kept = cache / "uncompressed"
    for folder in (kept, system, cache):
        # A damaged or half-filled folder is no reason to stop: the next place may be right.
        try:
            contents = read_all(folder, FILES)
        except RequestError:
            continue
        if folder is not kept:
            _keep(contents, kept)
        return contents
    reasons = []
    for fetch, origin in ((download, address), (unpack_debian, PACKAGE)):
        try:
            fetch(origin, FILES, cache)
            return read_all(cache, FILES)
        except RequestError as error:
            reasons.append(str(error))
    raise RequestError(
        f"fashion-mnist is neither in {system} nor to be fetched ({'; '.join(reasons)}): "
        f"install the package {PACKAGE}, or name the folder of its four files: fashion-mnist=FOLDER"
    )

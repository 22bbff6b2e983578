"""Fetches verified files from a web address, or out of a Debian package without root; whole or not at all."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import urlopen

from polyrhythm.data.files.cache import write_whole
from polyrhythm.data.files.verified_files import VerifiedFile, read_all
from polyrhythm.errors import RequestError

CONNECT_S = 10.0
DOWNLOAD_S = 300.0
COMMAND_S = 300.0
_CHUNK_BYTES = 1 << 20

_log = logging.getLogger(__name__)


def download(address: str, files: Sequence[VerifiedFile], into: Path) -> None:
    """Downloads files, gzipped, from below a web address, verifies them and puts them into a folder.

    Args:
        address: of the folder on the web, ending in `/`.
        files: `NAME.gz` of each is fetched.
        into: the folder; made if need be.

    Raises:
        RequestError: no connection, too slow, not what it must be, or `into` cannot be written.
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
            # Gzipped, it is smaller than what it holds; whoever sends more sends something else.
            if len(content) > most_bytes + 1024 or time.monotonic() > give_up_s:
                raise OSError(f"too large or too slow ({len(content)} bytes so far)")
    return bytes(content)


def unpack_debian(package: str, files: Sequence[VerifiedFile], into: Path) -> None:
    """Fetches a Debian package with apt-get, takes verified files out of it and puts them into a folder.

    Nothing is installed. Where the system has no package lists, they are fetched into a temporary folder.

    Args:
        package: its name.
        files: gzipped in any one folder of the package.
        into: the folder; made if need be.

    Raises:
        RequestError: no apt-get, no such package, no connection, too slow, or not what it must be.
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
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RequestError(f"{what}: {said[-1]}")

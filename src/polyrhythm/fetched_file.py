"""Download of a file, once: verified, and complete or absent."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

from polyrhythm.errors import RequestError

CONNECT_S = 10.0
DOWNLOAD_S = 1800.0
_CHUNK_BYTES = 1 << 20

_log = logging.getLogger(__name__)


def fetched(
    address: str, path: Path, checksum: str = "", *, kind: str = "sha256", what: str = "the weights"
) -> Path:
    """Download a file to `path` unless it exists, and return `path`.

    Args:
        address: URL.
        path: folders are created if necessary.
        checksum: first hexadecimal digits of its hash, if known.
        kind: name of the hash in hashlib.
        what: description of the file, for errors.

    Raises:
        RequestError: no connection, too slow, another file than expected, or it cannot be written.
    """
    if path.is_file():
        return path
    # A warning, because it can take minutes and should not look like a hang.
    _log.warning("fetching %s", address)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found = _download(address, part, kind)
        if not found.startswith(checksum):
            raise RequestError(
                f"{address} is not the known file (its {kind} begins with {found[:8]}, not {checksum[:8]})"
            )
        part.replace(path)
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise RequestError(
            f"{what} {address} cannot be fetched ({reason}): fetch it where there is a network, and put it at {path}"
        ) from None
    finally:
        with suppress(OSError):  # there is none after success
            part.unlink()
    return path


def _download(address: str, path: Path, kind: str) -> str:
    """Write the content of a URL to a file, and return its hash."""
    give_up_s = time.monotonic() + DOWNLOAD_S
    digest = hashlib.new(kind)
    with urlopen(address, timeout=CONNECT_S) as response, path.open("wb") as file:
        bytes_text = response.length
        while chunk := response.read1(_CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
            if time.monotonic() > give_up_s:
                raise OSError(f"not done after {DOWNLOAD_S:.0f} s")
        if bytes_text not in (None, file.tell()):
            raise OSError(f"{file.tell()} of {bytes_text} bytes arrived")
    return digest.hexdigest()

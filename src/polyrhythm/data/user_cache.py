"""The user's cache folder for what can be obtained again: downloaded data sets, results of long checks."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import NamedTemporaryFile


def cache_folder() -> Path:
    """Return `polyrhythm` in `$XDG_CACHE_HOME` or `~/.cache`; it may not exist yet."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "polyrhythm"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, and its folders, atomically: a reader sees all of it or nothing.

    Raises:
        OSError: the file cannot be written; no partial file remains.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as part:
        try:
            part.write(content)
            part.flush()
            Path(part.name).replace(path)
        except BaseException:
            Path(part.name).unlink(missing_ok=True)
            raise

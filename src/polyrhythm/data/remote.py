"""Data at a location of fsspec, copied to the user's cache: object stores, HDFS, HTTP.

A copy is the files of a folder, those that a pattern matches (`s3://bucket/train-*.tar`), or the folder of a table.
Files with the same facts (size, time, checksum, as far as the file system has them) are not copied again; files that
the location lacks are removed.
"""

from __future__ import annotations

import json
import logging
from functools import cache
from hashlib import sha256
from os import getpid
from pathlib import Path, PurePosixPath
from typing import Any

from polyrhythm.data.user_cache import cache_folder
from polyrhythm.errors import RequestError
from polyrhythm.locations import file_system

_TABLES = (".csv", ".tsv", ".parquet")
_FACTS = (
    "size",
    "ETag",
    "etag",
    "md5",
    "checksum",
    "mtime",
    "modificationTime",
    "LastModified",
    "updated",
    "created",
)
"""Facts of a file that change with its content."""
_INDEX = ".facts.json"
_log = logging.getLogger(__name__)


def is_location(text: str) -> bool:
    """Return whether a text is the URL of data elsewhere."""
    scheme, separator, _ = text.partition("://")
    return bool(separator) and scheme.isidentifier() and scheme != "hf"


@cache
def local_copy(url: str) -> str:
    """Return the path of a copy of data, which is made or brought up to date; once per process.

    Args:
        url: location of a folder, a file, or files with `*` in their names.

    Raises:
        RequestError: the location is unknown, empty, or cannot be read.
    """
    system, path = file_system(url, "data")
    whole = not path.lower().endswith(".tar") and "*" not in path
    table = path if path.lower().endswith(_TABLES) else None
    root = path if whole and table is None else str(PurePosixPath(path).parent)
    copy = cache_folder() / "copies" / sha256(url.encode()).hexdigest()[:16]
    try:
        found = system.find(root, detail=True) if whole else _matching(system, path)
        if not found:
            raise RequestError(f"{url} holds no files")
        kept, index = set(), copy / _INDEX
        known = _known(index)
        stated = {name: [str(facts.get(each)) for each in _FACTS] for name, facts in found.items()}
        for name in found:
            file = copy / PurePosixPath(name).relative_to(PurePosixPath(root))
            if not file.resolve().is_relative_to(copy.resolve()):
                raise RequestError(f"{url} holds a file outside it: {name}")
            kept.add(file)
            same = known.get(name) == stated[name] and any(fact != "None" for fact in stated[name])
            if not (same and file.is_file()):
                _fetch(system, name, file)
        index.write_text(json.dumps(stated), encoding="utf-8")
    except RequestError:
        raise
    except Exception as error:  # every file system has errors of its own
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise RequestError(f"{url} cannot be read ({reason:.200})") from error
    for file in copy.rglob("*"):
        if file.is_file() and file not in kept and not file.name.startswith("."):
            file.unlink()
    return str(copy if whole and table is None else copy / PurePosixPath(path).name)


def _known(index: Path) -> dict[str, Any]:
    """Return the facts of the files copied last; none where the index is missing or damaged."""
    try:
        known = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _matching(system: Any, pattern: str) -> dict[str, Any]:
    """Return the files of a pattern with their facts."""
    names = system.glob(pattern) if "*" in pattern else [pattern]
    return {name: system.info(name) for name in names}


def _fetch(system: Any, name: str, file: Path) -> None:
    """Copy a file, which appears whole or not at all."""
    _log.info("copying %s", name)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{getpid()}")
    try:
        system.get_file(name, str(part))
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)

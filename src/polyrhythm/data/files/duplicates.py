"""Finds files of the same content, whatever they are called; most are told apart by their size alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from hashlib import file_digest
from pathlib import Path


def duplicates(files: Sequence[str], among: Sequence[str]) -> dict[str, str]:
    """Finds the files that are among others too.

    Args:
        files: paths.
        among: paths that they are compared with.

    Returns:
        For each of `files` that has the bytes of one of `among`, the first such; in the order of `files`.
    """
    others = _by_size(among)
    suspects = [path for path in dict.fromkeys(files) if (size := _size(path)) is not None and size in others]
    known: dict[str, str] = {}
    for size in {_size(path) for path in suspects} - {None}:
        for path in others[size or 0]:
            known.setdefault(_content(path), path)
    return {path: known[content] for path in suspects if (content := _content(path)) in known}


def _by_size(files: Iterable[str]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = defaultdict(list)
    for path in dict.fromkeys(files):
        if (size := _size(path)) is not None:
            found[size].append(path)
    return found


def _size(path: str) -> int | None:
    try:
        return Path(path).stat().st_size
    except OSError:
        return None


def _content(path: str) -> str:
    with Path(path).open("rb") as file:
        return file_digest(file, "sha256").hexdigest()

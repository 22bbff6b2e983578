"""Finds the images that cannot be read, before a run starts on them; long checks are remembered."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch

from polyrhythm.data.files.cache import cache_folder, write_whole
from polyrhythm.data.pictures.images import bomb_warnings_are_errors, check

DECODE_UP_TO = 20_000
REMEMBER_AFTER_S = 2.0


def find_unreadable(files: Sequence[str], remember_after_s: float = REMEMBER_AFTER_S) -> dict[str, str]:
    """Checks images in parallel threads.

    Up to 20,000 files are decoded whole, so that one that is cut short is found; beyond, only headers are
    read, and such an image is found when its batch is made. A check that took long is remembered in the
    user's cache, by the paths, sizes and times of the files: every rank of a run need not do it again.

    Args:
        files: paths.
        remember_after_s: seconds above which the outcome is remembered.

    Returns:
        Why each unreadable file is so, by path, in the order of `files`.
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

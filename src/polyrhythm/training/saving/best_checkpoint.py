"""The checkpoint of the highest test accuracy, kept beside the newest ones whatever becomes of those.

It is a second name for the same file, so it takes no room and no time while its other name stays. What it has to
be beaten by stands in the name, and so outlives the run:

    step-00000024.safetensors
    best-top1-0.912500-step-00000024.safetensors
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

from polyrhythm.claim import UNCLAIMED, Unclaimed
from polyrhythm.errors import RunError

if TYPE_CHECKING:
    from pathlib import Path

_NAME = re.compile(r"best-top1-(\d\.\d{6})-step-\d{8,}\.safetensors")


def best_checkpoint(folder: Path) -> Path | None:
    """Finds the checkpoint of the highest test accuracy in a folder."""
    return next(iter(_best_first(folder)), None)


def keep_best(path: Path, top1: float, claim: Unclaimed = UNCLAIMED) -> None:
    """Keeps a checkpoint if it is better than the best one so far, and gives that one up; of equals the earlier stays.

    Args:
        path: of a whole checkpoint.
        top1: its test accuracy, a fraction; six decimals of it count.
        claim: to the folder.

    Raises:
        RunError: the system could not do so; the best one so far stays.
        Superseded: the folder is another's.
    """
    named = path.with_name(f"best-top1-{top1:.6f}-{path.name}")
    before = _best_first(path.parent)
    if before and _top1(before[0]) >= _top1(named):
        return
    try:
        _name_also(path, named, claim)
        for other in before:  # only now: a crash in between leaves two, of which the better one counts
            claim.remove(other)
    except OSError as error:
        claim.check()
        raise RunError(
            f"cannot keep {path} as the best checkpoint: {error.strerror or error}; the best one before it stays"
        ) from error


def _name_also(path: Path, named: Path, claim: Unclaimed) -> None:
    partial = claim.draft(named)
    try:
        partial.unlink(missing_ok=True)
        try:
            os.link(path, partial)
        except OSError:  # a file system without second names
            shutil.copyfile(path, partial)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
        claim.publish(named)
    finally:
        with suppress(OSError):
            partial.unlink()


def _best_first(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=_top1, reverse=True)


def _top1(path: Path) -> float:
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return float(found[1])

"""Checkpoints: whole or not at all, with a checksum, read without executing anything in them.

A checkpoint is one safetensors file. Its metadata holds `facts` (JSON) and `sha256`, which covers the facts
and every tensor's name, dtype, shape and bytes.

    write a draft of step-00000007.safetensors ── fsync ── rename it to that ── fsync folder
    └── a crash in here leaves the older files as they were ──┘

One folder has one writer: the start that has claimed it (`claim.py`), where there could be several.

The checkpoint of the highest test accuracy is kept next to the newest ones. It is a second name for the same
file, so it takes no room and no time while its other name stays. The accuracy that has to be exceeded stands
in the name, and so outlives the run:

    step-00000024.safetensors
    best-top1-0.912500-step-00000024.safetensors
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from polyrhythm.claim import UNCLAIMED, Unclaimed, open_new
from polyrhythm.errors import PolyrhythmError, RequestError, RunError, printable
from polyrhythm.run_files import check_in_run, exists_in_run, open_in_run, parse_json
from polyrhythm.safetensors_file import raw_bytes, write_safetensors

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path


_NAME = re.compile(r"step-(\d{8,})\.safetensors")
_ROOM_LEFT_BYTES = 1 << 20
_MOST_BITS = 64
_MISFITS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions of code that uses a value of an unexpected type, size or key."""


def checkpoint_path(folder: Path, step: int) -> Path:
    """Name the checkpoint of a step."""
    return folder / f"step-{step:08d}.safetensors"


def save_checkpoint(
    path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], claim: Unclaimed = UNCLAIMED
) -> str:
    """Write a checkpoint, whole or not at all; a file of this name is replaced only by a whole one.

    Args:
        path: path of the file, in an existing folder.
        tensors: tensors of any shape and device, and all dtypes of safetensors; they may share memory.
        facts: JSON-able. As usual in JSON, tuples are read as lists, and keys as texts.
        claim: claim to the folder.

    Returns:
        The checksum: sha256 in hexadecimal digits.

    Raises:
        RunError: the system could not write it, for example because the disk is full.
        Superseded: the folder is another's.
        ValueError: safetensors has no such dtype.
    """
    text = json.dumps(facts)
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    digest = _digest(text, stored)
    partial = claim.draft(path)
    try:
        _check_room(path.parent, sum(tensor.nbytes for tensor in stored.values()))
        with open_new(partial) as file:
            write_safetensors(file, stored, {"facts": text, "sha256": digest})
        flush(partial)
        claim.publish(path)
        flush(path.parent)
    except OSError as error:
        claim.check()
        reason = error.strerror or error
        raise RunError(
            f"cannot write checkpoint {path}: {reason}; older checkpoints are untouched"
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink()
    return digest


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint back, bit for bit, and check that nothing in it has changed.

    Returns:
        Its tensors, on the CPU, and its facts.

    Raises:
        RequestError: there is none, it was cut short or changed, or it is something else. Names the newest
            other whole checkpoint next to it, if there is one.
    """
    if not exists_in_run(path) or path.is_dir():
        raise RequestError(f"there is no checkpoint {path}{_instead_of(path)}")
    try:
        return _read(path)
    except SafetensorError:
        reason = "it was cut short, or it is not a checkpoint"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise RequestError(f"checkpoint {path} cannot be used: {reason}{_instead_of(path)}")


def checkpoints(folder: Path) -> list[Path]:
    """Find the checkpoints in a folder, that of the highest step first; only `load_checkpoint` checks them.

    There are none in a folder that is not there, or that vanishes in the meantime.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    steps = {folder / name: int(found[1]) for name in names if (found := _NAME.fullmatch(name))}
    return sorted(steps, key=lambda path: steps[path], reverse=True)


def prune(folder: Path, keep: int, claim: Unclaimed = UNCLAIMED, also: Collection[int] = frozenset()) -> None:
    """Remove all checkpoints but the `keep` newest and those of the steps `also`, and half-written ones of a crash.

    Raises:
        Superseded: the folder is another's.
        ValueError: `keep` is below 1.
    """
    if keep < 1:
        raise ValueError(f"cannot keep {keep} checkpoints")
    kept = {checkpoint_path(folder, step) for step in also}
    old = [path for path in checkpoints(folder)[keep:] if path not in kept]
    with suppress(FileNotFoundError):  # the folder has vanished in the meantime, with all that was in it
        old += [path for kind in ("step", "best") for path in folder.glob(f".{kind}-*.partial")]
    for path in old:
        claim.remove(path)


def forget_beyond(folder: Path, step: int, claim: Unclaimed = UNCLAIMED) -> None:
    """Remove the checkpoints of higher steps, which remain when a run continues with another number of workers.

    Raises:
        Superseded: the folder is another's.
    """
    for path in checkpoints(folder):
        found = _NAME.fullmatch(path.name)
        if found is not None and int(found[1]) > step:
            claim.remove(path)


def _check_room(folder: Path, size_bytes: int) -> None:
    """Leave a disk that is nearly full to the run's log, which would otherwise fail while this fills it."""
    disk = shutil.disk_usage(folder)
    if disk.total and disk.free < size_bytes + _ROOM_LEFT_BYTES:  # some file systems know no sizes
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    check_in_run(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if not {"facts", "sha256"} <= metadata.keys():
            raise ValueError("it is not a checkpoint")
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if _digest(metadata["facts"], tensors) != metadata["sha256"]:
        raise ValueError("it was changed after it was written (its checksum differs)")
    facts = parse_json(metadata["facts"], str(path))
    if not isinstance(facts, dict):
        raise ValueError("it is not a checkpoint")
    return tensors, facts


def check_numbers(value: Any) -> None:
    """Check that all numbers in a JSON value are finite and have at most 64 bits.

    Raises:
        ValueError: one is not.
    """
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            check_numbers(part)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"it holds the number {value}")
    elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError("it holds a number of more than 64 bits")


@contextmanager
def restoring(what: str) -> Iterator[None]:
    """Report values of a saved state that do not fit the run as an error of one line.

    The state may be another person's, with any JSON values in it.

    Args:
        what: name of the state, for the error.

    Raises:
        RequestError: the block raised an exception that a wrong type, size, key or number causes.
    """
    try:
        yield
    except PolyrhythmError:
        raise
    except _MISFITS as error:
        reason = printable(f"{type(error).__name__}: {error}")
        raise RequestError(f"{what} does not fit this run ({reason:.200}): take another") from error


def _instead_of(path: Path) -> str:
    for other in checkpoints(path.parent):
        if other.name != path.name and _is_whole(other):
            return f"; the newest complete one next to it is {other}"
    return ""


def _is_whole(path: Path) -> bool:
    try:
        _read(path)
    except (OSError, SafetensorError, ValueError):
        return False
    return True


def flush(path: Path) -> None:
    """Wait until a file or a folder is on the disk and not just in the system's memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some network file systems cannot flush folders
            raise
    finally:
        os.close(descriptor)


_BEST_NAME = re.compile(r"best-top1-(\d\.\d{6})-step-\d{8,}\.safetensors")


def best_checkpoint(folder: Path) -> Path | None:
    """Find the checkpoint of the highest test accuracy in a folder."""
    return next(iter(_best_first(folder)), None)


def keep_best(path: Path, top1: float, claim: Unclaimed = UNCLAIMED) -> None:
    """Keep a checkpoint if it is better than the best one so far, and drop that one; of equals the earlier stays.

    Args:
        path: path of a whole checkpoint.
        top1: test accuracy of the checkpoint, a fraction; six decimals of it count.
        claim: claim to the folder.

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
        for other in before:  # only now: a crash in between leaves two, and the better one counts
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
            with open_in_run(path, most_bytes=0) as source, open_new(partial) as copy:
                shutil.copyfileobj(source, copy)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
        claim.publish(named)
    finally:
        with suppress(OSError):
            partial.unlink()


def _best_first(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(
        (path for path in folder.iterdir() if _BEST_NAME.fullmatch(path.name)), key=_top1, reverse=True
    )


def _top1(path: Path) -> float:
    found = _BEST_NAME.fullmatch(path.name)
    assert found is not None
    return float(found[1])

"""The two kinds of errors that a user must be able to distinguish."""

from __future__ import annotations

import errno
import unicodedata
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_NO_SUCH_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO)
_OFFERED, _WORTH_COMPLETING = 3, 3
_ALIKE, _AS_LIKE = 0.55, 0.82
"""Least similarity, from 0 to 1, of a suggestion to what was given, and relative to the most similar name."""


class PolyrhythmError(Exception):
    """Base of all intentional errors of this project; the message is one line and contains the remedy."""


class RequestError(PolyrhythmError, ValueError):
    """The request was wrong, and the user can correct it (exit status 2)."""


class RunError(PolyrhythmError, RuntimeError):
    """The run failed although the request was right (exit status 1)."""


class PeerLost(RunError):
    """A rank that this one communicates with is lost.

    Attributes:
        rank: the lost peer.
        losses: number of processes with this rank that are known to have failed.
    """

    def __init__(self, rank: int, while_doing: str, losses: int = 1) -> None:
        super().__init__(f"rank {rank} is gone (noticed while {while_doing})")
        self.rank = rank
        self.losses = losses


class OutOfStep(RunError):
    """Workers that go in lockstep are not at the same place of their programs."""


class Dismissed(PeerLost):
    """A server continues without this worker.

    Attributes:
        rank: the server's.
    """

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(rank, "being evicted")
        self.args = (f"rank {rank} has evicted this worker: {why}",)


def printable(text: str) -> str:
    """Return a text in one line: control characters and line separators as escapes, so that no terminal obeys them."""
    if text.isprintable():
        return text
    return "".join(
        letter.encode("unicode_escape").decode()
        if unicodedata.category(letter) in ("Cc", "Zl", "Zp")
        else letter
        for letter in text
    )


def fault_of_machine(error: BaseException) -> RunError | RequestError | None:
    """Return the error to report if machine or path is the cause (memory, a full disk), otherwise None."""
    if isinstance(error, OSError) and error.errno in _NO_SUCH_PATH and error.filename is not None:
        return RequestError(f"{error.strerror}: {error.filename!r:.100}: give another path")
    if isinstance(error, OSError) and error.errno in _NOT_WRITABLE:
        return RunError(": ".join(str(part) for part in (error.strerror, error.filename) if part is not None))
    if is_out_of_memory(error):
        return RunError(
            "memory is not enough: take a smaller --batch-size or --image-size, a smaller model, or fewer --workers"
        )
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory was not enough, of the machine or of a GPU."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"  # of torch, which must not be imported for this
        or "can't allocate memory" in str(error)
    )


def unknown(what: str, given: str, known: Iterable[str]) -> RequestError:
    """Return the error for an unknown name, with similar names as suggestions, or all names if there are few.

    Of many the first ones are named, so `known` begins with those that most people would want.
    """
    first = list(known)
    names = sorted(first)
    near = _near(given.lower(), names)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    elif len(names) <= 20:
        hint = f"there {'is' if len(names) == 1 else 'are'} {', '.join(names)}"
    else:
        hint = f"there are {len(names)}, such as {', '.join(first[:5])}"
    return RequestError(f"unknown {what} {given!r:.200}: {hint}")


def _near(given: str, names: list[str]) -> list[str]:
    """Return at most 3 names: those that start with `given`, or else the most similar ones, best first."""
    # A prefix is most likely an abbreviation, so completions precede names that are merely similar.
    longer = [name for name in names if name.startswith(given)] if len(given) >= _WORTH_COMPLETING else []
    if longer:
        return sorted(longer, key=len)[:_OFFERED]
    likeness = {name: SequenceMatcher(a=name, b=given).ratio() for name in names}
    least = max(_ALIKE, _AS_LIKE * max(likeness.values(), default=0.0))
    likest_first = sorted(names, key=lambda name: (-likeness[name], name))
    return [name for name in likest_first if likeness[name] >= least][:_OFFERED]

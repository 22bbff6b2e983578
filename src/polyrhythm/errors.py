"""What can go wrong, in the two kinds that a user must be able to tell apart."""

from __future__ import annotations

import errno
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_OFFERED, _WORTH_COMPLETING = 3, 3
_ALIKE, _AS_LIKE = 0.5, 0.82
"""Of 1: how like a name must be to what was given, and to the likest name."""


class PolyrhythmError(Exception):
    """Anything that this project raises on purpose; its text is one line and says what to do."""


class RequestError(PolyrhythmError, ValueError):
    """The request was wrong: the user can mend it (exit status 2)."""


class RunError(PolyrhythmError, RuntimeError):
    """The run failed although the request was right (exit status 1)."""


class PeerLost(RunError):
    """A rank that this one was talking to is gone.

    Attributes:
        rank: the lost peer.
        losses: how many that had this rank are known to be gone.
    """

    def __init__(self, rank: int, while_doing: str, losses: int = 1) -> None:
        super().__init__(f"rank {rank} is gone (noticed while {while_doing})")
        self.rank = rank
        self.losses = losses


class LetGo(PeerLost):
    """A server does without this worker.

    Attributes:
        rank: the server's.
    """

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(rank, "being let go")
        self.args = (f"rank {rank} has let this worker go: {why}",)


def fault_of_machine(error: BaseException) -> RunError | None:
    """Gives what is to be said where the machine is the reason: memory, or a disk that takes no more; else None."""
    if isinstance(error, OSError) and error.errno in _NOT_WRITABLE:
        return RunError(": ".join(str(part) for part in (error.strerror, error.filename) if part is not None))
    if (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"  # of torch, which must not be imported for this
        or "can't allocate memory" in str(error)
    ):
        return RunError(
            "memory is not enough: take a smaller --batch-size or --image-size, a smaller model, or fewer --workers"
        )
    return None


def unknown(what: str, given: str, known: Iterable[str]) -> RequestError:
    """Makes the error for a name that nobody knows; offers the near ones, or all if there are few."""
    names = sorted(known)
    near = _near(given.lower(), names)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    elif len(names) <= 20:
        hint = f"there {'is' if len(names) == 1 else 'are'} {', '.join(names)}"
    else:
        hint = f"there are {len(names)}, such as {', '.join(names[:5])}"
    return RequestError(f"unknown {what} {given!r}: {hint}")


def _near(given: str, names: list[str]) -> list[str]:
    """Gives the names that go on where `given` ends, or else those as like it as the likest, that first; at most 3."""
    longer = [name for name in names if name.startswith(given)] if len(given) >= _WORTH_COMPLETING else []
    if longer:
        return sorted(longer, key=len)[:_OFFERED]
    likeness = {name: SequenceMatcher(a=name, b=given).ratio() for name in names}
    least = max(_ALIKE, _AS_LIKE * max(likeness.values(), default=0.0))
    likest_first = sorted(names, key=lambda name: (-likeness[name], name))
    return [name for name in likest_first if likeness[name] >= least][:_OFFERED]

"""What can go wrong, in the two kinds that a user must be able to tell apart."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


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
    """

    def __init__(self, rank: int, while_doing: str) -> None:
        super().__init__(f"rank {rank} is gone (noticed while {while_doing})")
        self.rank = rank


def unknown(what: str, given: str, known: Iterable[str]) -> RequestError:
    """Makes the error for a name that nobody knows; offers the near ones, or all if there are few."""
    names = sorted(known)
    near = get_close_matches(given.lower(), names, n=3, cutoff=0.5)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    elif len(names) <= 20:
        hint = f"there {'is' if len(names) == 1 else 'are'} {', '.join(names)}"
    else:
        hint = f"there are {len(names)}, such as {', '.join(names[:5])}"
    return RequestError(f"unknown {what} {given!r}: {hint}")

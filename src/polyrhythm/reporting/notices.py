"""Notices of many ranks in few lines.

Notices that differ in their numbers alone are of one kind. The first few of a kind are shown at once. Of those that
follow within a few seconds, the latest is shown, with the workers or ranks of the others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

SHOWN, PAUSE_S = 4, 2.0
"""Notices of a kind that are shown one by one, and the seconds after which those that follow are shown together."""

_NAMED = 8
_NUMBERS = re.compile(r"\d+(?:[.,]\d+)*(?:, \d+(?:[.,]\d+)*)*")
_RANK = re.compile(r"\b(worker|rank|server) (\d+)")


@dataclass
class _Kind:
    """Notices that differ in their numbers alone.

    Attributes:
        shown: number of those shown one by one.
        first_s: time of the first of `waiting`.
        waiting: those that are to be shown together.
    """

    shown: int = 0
    first_s: float = 0.0
    waiting: list[str] = field(default_factory=list)


class Notices:
    """Decides which notices are shown when; times are those of events."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}

    def add(self, text: str, time_s: float) -> list[str]:
        """Take a notice; return the lines to show now."""
        kind = self._kinds.setdefault(_NUMBERS.sub("0", text), _Kind())
        if kind.shown < SHOWN:
            kind.shown += 1
            return [text]
        if not kind.waiting:
            kind.first_s = time_s
        kind.waiting.append(text)
        return []

    def due(self, time_s: float) -> list[str]:
        """Return the lines to show at this time."""
        kinds = [kind for kind in self._kinds.values() if kind.waiting and time_s >= kind.first_s + PAUSE_S]
        return [line for kind in kinds for line in _taken(kind)]

    def rest(self) -> list[str]:
        """Return the lines that have not been shown yet."""
        return [line for kind in self._kinds.values() if kind.waiting for line in _taken(kind)]


def _taken(kind: _Kind) -> list[str]:
    *others, last = kind.waiting
    kind.waiting = []
    if not others:
        return [last]
    named = [match for text in others if (match := _RANK.search(text))]
    numbers = [str(number) for number in sorted({int(match[2]) for match in named})]
    which = "".join(f": {kind}s " for kind in {match[1] for match in named})
    shown = ", ".join(numbers[:_NAMED]) + ", …" * (len(numbers) > _NAMED)
    return [f"{last} ({len(others)} more like this{which}{shown})"]

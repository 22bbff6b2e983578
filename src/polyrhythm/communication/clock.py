"""Clocks: what time it is, and waiting until later, for real or in virtual time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells and passes time, in seconds."""

    def now(self) -> float:
        """Seconds since the clock's own start."""

    def sleep(self, seconds: float) -> None:
        """Returns `seconds` later on this clock."""


class WallClock:
    """Real time; starts at 0 when made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._start

    def sleep(self, seconds: float) -> None:
        """Blocks this thread."""
        time.sleep(seconds)

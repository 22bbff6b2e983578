"""A clock of the seconds in which this process could run."""

from __future__ import annotations

import time


class LivedClock:
    """Counts the seconds in which this process could run: a whole run that is stopped for a while has missed nothing.

    Args:
        beat_s: after which it is told to tick; whoever takes much longer was stopped.

    Attributes:
        now_s: counted so far.
    """

    def __init__(self, beat_s: float) -> None:
        self.now_s = 0.0
        self._longest_s = 3 * beat_s
        self._ticked_s = time.monotonic()

    def tick(self) -> None:
        """Counts what has passed since the last time."""
        now_s = time.monotonic()
        self.now_s += min(now_s - self._ticked_s, self._longest_s)
        self._ticked_s = now_s

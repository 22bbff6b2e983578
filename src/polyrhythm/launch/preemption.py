"""Preemption: a machine that is about to be taken away says so with SIGTERM, and keeps its word after a notice.

    SIGTERM ─▶ the run is asked to stop ─▶ checkpoint ─▶ status 75
       └────────── notice ──────────▶ what has not been written by then is given up: status 75, and the last checkpoint

The status is EX_TEMPFAIL of sysexits.h, "the user is invited to try again": none of a failure (1), of a wrong request
(2) or of a person's interrupt (130), so that a launcher can be told to start again after this one alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from polyrhythm.errors import RunError

PREEMPTED = 75
"""Exit status of a run, or of a guest, that was preempted: start it again."""

_SHARE = 0.9
"""Of the notice; the rest is for leaving."""


class Preempted(RunError):
    """The notice has run out before everything was written."""


class Preemption:
    """Whether this host has been told that it is taken away, and until when it may be used.

    Args:
        notice_s: seconds between SIGTERM and the end; None where SIGTERM means no more than SIGINT.
        clock: gives seconds.
    """

    def __init__(self, notice_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._notice_s = notice_s
        self._clock = clock
        self._until_s: float | None = None

    @property
    def is_possible(self) -> bool:
        """Whether a notice is given at all."""
        return self._notice_s is not None

    @property
    def begun(self) -> bool:
        """Whether the notice has come."""
        return self._until_s is not None

    def begin(self) -> None:
        """SIGTERM has come; only the first counts."""
        if self._notice_s is not None and self._until_s is None:
            self._until_s = self._clock() + _SHARE * self._notice_s

    @property
    def left_s(self) -> float | None:
        """Seconds that may still be used, 0 when there are none; None if no notice has come."""
        return None if self._until_s is None else max(0.0, self._until_s - self._clock())

    def check(self, resume: str) -> None:
        """Checks that there is time left.

        Args:
            resume: how to go on, for people.

        Raises:
            Preempted: there is none.
        """
        if self.left_s == 0.0:
            raise Preempted(
                f"the notice of {self._notice_s:g} s ran out before a checkpoint was whole: {resume}, from the last one"
            )

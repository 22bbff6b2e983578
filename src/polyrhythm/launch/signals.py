"""Signals as requests to stop, and preemption of a machine.

SIGINT and SIGTERM ask a run to stop after the present step, with a checkpoint. A machine that is about to be
taken away says so with SIGTERM, and is taken away when the time of its notice has passed:

    SIGTERM ─▶ the run is asked to stop ─▶ checkpoint ─▶ status 75
       └────────── notice ──────────▶ what has not been written by then is given up: status 75, and the last checkpoint

The status is EX_TEMPFAIL of sysexits.h, "the user is invited to try again": none of a failure (1), of a wrong
request (2) or of a person's interrupt (130), so that a launcher can be told to start again after this one
alone.

Imports nothing that is slow: the command line imports it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from polyrhythm.errors import RunError

ASKING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held_back() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back in this thread, and in the processes that it starts meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def asked_to_stop(ask: Callable[[], None], preempt: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Call `ask` at the first SIGINT or SIGTERM; a second SIGINT interrupts at once, as usual.

    Outside the main thread, where no handler can be set, signals keep their meaning.

    Args:
        ask: asks the run to stop.
        preempt: called before that at a SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if number == signal.SIGTERM:
            preempt()
        ask()

    before = {number: signal.signal(number, handle) for number in ASKING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
        """Take SIGTERM; only the first counts."""
        if self._notice_s is not None and self._until_s is None:
            self._until_s = self._clock() + _SHARE * self._notice_s

    @property
    def left_s(self) -> float | None:
        """Seconds that may still be used, 0 when there are none; None if no notice has come."""
        return None if self._until_s is None else max(0.0, self._until_s - self._clock())

    def check(self, resume: str) -> None:
        """Check that there is time left.

        Args:
            resume: how to go on, for people.

        Raises:
            Preempted: there is none.
        """
        if self.left_s == 0.0:
            raise Preempted(
                f"the notice of {self._notice_s:g} s ran out before a checkpoint was whole: {resume}, from the last one"
            )

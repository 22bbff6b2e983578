"""Signals as requests to stop, from a program's first line to its last, and preemption of a machine.

SIGINT (a person), SIGTERM (a machine) and SIGHUP (a terminal that is gone, unless it is ignored as under nohup) ask
for the same:

    until the run has begun       the program ends at once, and nothing is written              status 130 or 75
    in the run                    it stops after the present step, with a checkpoint            status 130 or 75
    while the last files of a     they are written whole, then the program ends                 status 130 or 75
      run are written
    a second SIGINT               interrupts at once; further ones have the same effect

A machine that is about to be taken away sends SIGTERM, and is taken away when the time of its notice has
passed:

    SIGTERM ─▶ the run is asked to stop ─▶ checkpoint ─▶ status 75
       └────────── notice ──────────▶ what has not been written by then is given up: status 75, and the last checkpoint

The status is EX_TEMPFAIL of sysexits.h, "the user is invited to try again": it differs from that of a failure
(1), of a wrong request (2) and of a user's interrupt (130), so that a launcher can restart after this one
alone.

Imports nothing that is slow: the command line imports it first.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from polyrhythm.errors import RunError

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130
_IMPORTING = "<frozen importlib._bootstrap>"
_arrived: set[int] = set()


def interrupt(number: int, frame: FrameType | None) -> None:
    """Exit at once while something is being imported; otherwise raise KeyboardInterrupt.

    A KeyboardInterrupt in the middle of an import may be lost: PyTorch, for one, continues without NumPy if
    importing NumPy fails, and swallows the user's Ctrl-C with it.
    """
    _arrived.add(number)
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            word, status = interruption(sys.argv[1:])
            with suppress(OSError, AttributeError):  # the terminal may be gone
                sys.stderr.write(f"{word}\n")
                sys.stderr.flush()
            os._exit(status)
        frame = frame.f_back
    raise KeyboardInterrupt


def interruption(arguments: Sequence[str]) -> tuple[str, int]:
    """Return in a word how a verb with these arguments has been interrupted, and its exit status."""
    if signal.SIGTERM in _arrived and _has_notice(arguments):
        return "preempted", PREEMPTED
    return "interrupted", INTERRUPTED


def _has_notice(arguments: Sequence[str]) -> bool:
    """Whether `--notice-s` is among the arguments, or in a recipe or run folder that they name; a guest has it."""
    if arguments[:1] == ["join"]:
        return True
    for word in arguments:
        recipe = Path(word) / "config.yaml" if Path(word).is_dir() else Path(word)
        with suppress(OSError, ValueError):
            if word.startswith("--notice-s") or (
                recipe.suffix in (".yaml", ".yml")
                and re.search(r"^notice_s\s*:\s*[\d.]", recipe.read_text(), re.MULTILINE)
            ):
                return True
    return False


@contextmanager
def held_back() -> Iterator[None]:
    """Hold signals that ask to stop back in this thread, and in the processes that it starts in the meantime."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_open = 0
_received: list[int] = []
"""Signals since the outermost `asked_to_stop` was entered, and how many of them an inner one has passed on."""
_passed_on = 0


@contextmanager
def asked_to_stop(
    ask: Callable[[], None] | None = None, preempt: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Call `ask` at a signal that asks to stop, `preempt` before it at a SIGTERM; a second SIGINT interrupts as usual.

    Without `ask`, signals are deferred until another `asked_to_stop` is entered inside, or this one ends, and
    delivered then. Outside the main thread no handler can be set, and signals keep their default effect.
    """
    global _open, _passed_on
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def act(number: int) -> None:
        if ask is not None:
            if number == signal.SIGTERM:
                preempt()
            ask()

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and _received:
            raise KeyboardInterrupt
        _arrived.add(number)
        _received.append(number)
        act(number)

    before = {}
    for number in ASKING:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handle)
    _open += 1
    try:
        for received in list(_received):
            act(received)
        yield
    finally:
        if ask is not None:
            _passed_on = len(_received)
        for number, handler in before.items():
            signal.signal(number, handler)
        _open -= 1
        if not _open:
            held, _passed_on = _received[_passed_on:], 0
            _received.clear()
            if held and sys.exc_info()[0] is None:
                signal.raise_signal(held[0])


PREEMPTED = 75
"""Exit status of a run, or of a guest, that was preempted: start it again."""

_SHARE = 0.9
"""Usable share of the notice; the rest is for leaving."""


class Preempted(RunError):
    """The notice has run out before everything was written."""


class Preemption:
    """Preemption notice of this host, and the end of its usable time.

    Args:
        notice_s: seconds between SIGTERM and the end; None where SIGTERM means no more than SIGINT.
        clock: function that returns seconds.
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
        """Whether the notice has been received."""
        return self._until_s is not None

    def begin(self) -> None:
        """Take SIGTERM; only the first counts."""
        if self._notice_s is not None and self._until_s is None:
            self._until_s = self._clock() + _SHARE * self._notice_s

    @property
    def left_s(self) -> float | None:
        """Remaining usable seconds, at least 0; None without a notice."""
        return None if self._until_s is None else max(0.0, self._until_s - self._clock())

    def check(self, resume: str) -> None:
        """Check that there is time left.

        Args:
            resume: instructions to resume, for users.

        Raises:
            Preempted: there is none.
        """
        if self.left_s == 0.0:
            raise Preempted(
                f"the notice of {self._notice_s:g} s ran out before a checkpoint was whole: {resume}, from the last one"
            )

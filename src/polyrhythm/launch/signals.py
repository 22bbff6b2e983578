"""Signals as requests to stop: SIGINT and SIGTERM ask a run to stop after the present step, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ASKING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held_back() -> Iterator[None]:
    """Holds SIGINT and SIGTERM back in this thread, and in the processes that it starts meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def asked_to_stop(ask: Callable[[], None], preempt: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Calls `ask` at the first SIGINT or SIGTERM; a second SIGINT interrupts at once, as usual.

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

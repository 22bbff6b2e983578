"""A word that one sleeps at until somebody writes it."""

from __future__ import annotations

import threading
import time

from polyrhythm.communication.transports.shared_memory.barrier import FutexWord

LONG_S = 60.0


def word(number: int) -> FutexWord:
    made = FutexWord(memoryview(bytearray(8 * 4)).cast("q"), 2)
    made.write(number)
    return made


def test_who_comes_late_does_not_sleep() -> None:
    made = word(2**32 + 8)
    began = time.perf_counter()
    made.sleep(2**32 + 7, LONG_S)
    assert time.perf_counter() - began < LONG_S / 2
    assert made.read() == 2**32 + 8


def test_who_sleeps_is_woken() -> None:
    """Told again until it has gone on: the first call may come before it lies down, with the word unchanged."""
    made = word(7)
    slept: list[float] = []

    def sleep() -> None:
        began = time.perf_counter()
        made.sleep(7, LONG_S)
        slept.append(time.perf_counter() - began)

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    while sleeper.is_alive():
        made.wake()
        sleeper.join(0.001)
    assert slept[0] < LONG_S / 2

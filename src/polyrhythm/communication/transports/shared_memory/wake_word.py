"""A word in shared memory that processes sleep at until somebody writes it: Linux's futex.

    sleeper    sleep(7) ────── asleep, unless the word is no longer 7 ──────▶ goes on
    waker                        write(8), wake() ─────────────────────────────▲

The kernel compares the word once more before it lets a sleeper lie down, so a waker that came first is not slept
through. Where there is no futex that we know how to call, sleepers look again after a short while.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import time
from typing import Any

_SYSTEM_CALLS = {"x86_64": 202, "amd64": 202, "s390x": 238}
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1
_LOW_WORD = (1 << 32) - 1
_WORD_BYTES = 8
_LOOK_AGAIN_S = 100e-6


class _Duration(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class WakeWord:
    """One process's view of the word.

    Args:
        words: shared memory, as whole numbers of 8 bytes.
        place: of the word among them.
    """

    def __init__(self, words: memoryview, place: int) -> None:
        self._words = words
        self._place = place
        self._call = _futex()
        low_half = 0 if sys.byteorder == "little" else _WORD_BYTES // 2
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(words, place * _WORD_BYTES + low_half))

    def read(self) -> int:
        """Gives the word."""
        number: int = self._words[self._place]
        return number

    def write(self, number: int) -> None:
        """Writes the word; who sleeps goes on sleeping until `wake`."""
        self._words[self._place] = number

    def wake(self) -> None:
        """Wakes all who sleep."""
        if self._call is not None:
            self._call(self._address, _WAKE, _ALL, None)

    def sleep(self, while_it_is: int, at_most_s: float) -> None:
        """Sleeps until somebody wakes this process, or for so long; not at all if the word has changed."""
        if self._call is None:
            time.sleep(min(at_most_s, _LOOK_AGAIN_S))
        else:
            seconds, rest = divmod(at_most_s, 1)
            duration = _Duration(int(seconds), int(rest * 1e9))
            self._call(self._address, _WAIT, while_it_is & _LOW_WORD, ctypes.byref(duration))


def _futex() -> Any:
    """Gives the system call, which lets go of Python's lock while it sleeps; None where its number is not known."""
    number = _SYSTEM_CALLS.get(platform.machine().lower())
    if number is None or sys.platform != "linux" or sys.maxsize < 2**32:
        return None
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long

    def futex(address: int, operation: int, value: int, duration: Any) -> None:
        call(
            ctypes.c_long(number),
            ctypes.c_void_p(address),
            ctypes.c_int(operation),
            ctypes.c_uint(value),
            duration,
        )

    return futex

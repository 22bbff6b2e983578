"""A barrier of sequence numbers in shared memory.

Every member has a line of its own, which it alone writes: the number of the barrier that it has reached. It
passes when all other numbers are as high.

    member 0   7 ──────────▶ 8 ·· waits ·· ▶ passes
    member 1   7 ──▶ 8 ·· waits ·········· ▶ passes
    member 2   7 ─────────────────────▶ 8  ▶ passes

A waiting member spins as long as no other process wants its core; then, and where others take long, it sleeps
until the last one arrives; sooner where there are more members than cores. So several ranks may share a core:
a waiting one costs the others nothing.

No lock and no atomic operation is needed, only that stores become visible in their order and loads happen in
theirs, as x86 and s390x promise (`is_tso`). Other machines (ARM) would need a fence, which Python
cannot give.

Processes sleep at a word in shared memory until another writes it (`FutexWord`): Linux's futex.

    sleeper    sleep(7) ────── asleep, unless the word is no longer 7 ──────▶ continues
    waker                        write(8), wake() ─────────────────────────────▲

The kernel compares the word once more before it puts a sleeper to sleep, so an earlier wake-up is not missed.
Where there is no known futex call, sleepers look again after a short while. `Lifelines` detects members that
have ended, zombies among them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from polyrhythm.communication.transports.member_collectives import REVOKED, UNKNOWN_RANK, CollectiveBroken

LINE_WORDS = 16
"""Words of 8 bytes in a member's line: two cache lines, because processors fetch them in pairs."""


class Lifelines:
    """Watches processes through descriptors (pidfd), which a new process of the same number cannot take over.

    Raises:
        OSError: one of them has ended already, or the system has no such descriptors.
    """

    def __init__(self, processes: Sequence[int]) -> None:
        if not hasattr(os, "pidfd_open"):
            raise OSError("this system has no descriptors of processes (pidfd)")
        self._places: dict[int, int] = {}
        self._ended: set[int] = set()
        self._lock = threading.Lock()
        self._poll = select.poll()
        try:
            for place, process in enumerate(processes):
                descriptor = os.pidfd_open(process)
                self._places[descriptor] = place
                self._poll.register(descriptor, select.POLLIN)
        except OSError:
            self.close()
            raise

    def ended(self) -> set[int]:
        """Return the places, in the given order of processes, of those that have ended; never waits."""
        with self._lock:
            for descriptor, _ in self._poll.poll(0):
                self._ended.add(self._places[descriptor])
        return self._ended

    def close(self) -> None:
        """Stop watching; processes that have ended by then stay known. Another thread may be looking."""
        with self._lock:  # a number that is closed may be another file's at once
            for descriptor in self._places:
                os.close(descriptor)
            self._places = {}
            self._poll = select.poll()


_SYSTEM_CALLS = {"x86_64": 202, "amd64": 202, "s390x": 238}
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1
_LOW_WORD = (1 << 32) - 1
_WORD_BYTES = 8
_LOOK_AGAIN_S = 100e-6


class _Duration(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class FutexWord:
    """One process's view of the word.

    Args:
        words: shared memory, as 8-byte integers.
        place: place of the word among them.
    """

    def __init__(self, words: memoryview, place: int) -> None:
        self._words = words
        self._place = place
        self._call = _futex()
        low_half = 0 if sys.byteorder == "little" else _WORD_BYTES // 2
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(words, place * _WORD_BYTES + low_half))

    def read(self) -> int:
        """Return the word."""
        number: int = self._words[self._place]
        return number

    def write(self, number: int) -> None:
        """Write the word; sleeping processes sleep on until `wake`."""
        self._words[self._place] = number

    def wake(self) -> None:
        """Wake all that sleep."""
        if self._call is not None:
            self._call(self._address, _WAKE, _ALL, None)

    def sleep(self, while_it_is: int, at_most_s: float) -> None:
        """Sleep until another process wakes this one, or for so long; not at all if the word has changed."""
        if self._call is None:
            time.sleep(min(at_most_s, _LOOK_AGAIN_S))
        else:
            seconds, rest = divmod(at_most_s, 1)
            duration = _Duration(int(seconds), int(rest * 1e9))
            self._call(self._address, _WAIT, while_it_is & _LOW_WORD, ctypes.byref(duration))


def _futex() -> Any:
    """Return the system call, which lets go of Python's lock while it sleeps; None where its number is not known."""
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


_DESCRIPTION, _STATE, _ASLEEP = 1, 3, 4
_LAST_WORD = 8
"""In the first member's line: the latest barrier that all have reached, as the last of them has seen it."""
_PRESENT, _LEFT, _REVOKED, _BROKEN = 0, 1, 2, 3

_SPINNING_S, _CROWDED_S = 1e-3, 100e-6
"""For how long a member looks again and again, and for how long it gives its core away if that is shared. To fall
asleep and be woken takes as long as a step of a small network, and an interrupt takes some 50 us."""
_SPINNING_OF_MANY_S, _CROWDED_OF_MANY_S = 100e-6, 20e-6
"""The same where members share cores: while some look, the system leaves others waiting on one core."""
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 1e-3, 8e-3
"""Upper bound: to detect a member that will never arrive, and a wake-up that preceded this member's sleep."""
_FEW, _LONGEST_OF_MANY_S = 16, 1.0
"""More members than so few sleep longer, by the square of their number: each of them looks at all others."""


def is_tso() -> bool:
    """Return whether this machine keeps the order of stores, and of loads, for others to see."""
    return platform.machine().lower() in ("x86_64", "amd64", "i386", "i686", "s390x")


def _cores() -> int:
    """Return on how many cores this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Barrier:
    """One member's side of the barrier, and the members' states on their lines.

    Attributes:
        crossed: number of barriers that this member has passed.
        patient: whether to sleep at once while waiting, because this process has something else to compute.
        broken: reason to stop waiting for any member.
    """

    def __init__(
        self, words: memoryview, member: int, members: tuple[int, ...], lifelines: Lifelines
    ) -> None:
        self.crossed = 0
        self.patient = False
        self.broken: CollectiveBroken | None = None
        self._words = words
        self._members = members
        self._lifelines = lifelines
        self._own = member * LINE_WORDS
        self._numbers = words[::LINE_WORDS]
        self._asleep = words[_ASLEEP::LINE_WORDS]
        self._last = FutexWord(words, _LAST_WORD)
        many = len(members) > _cores()
        self._spinning_s = _SPINNING_OF_MANY_S if many else _SPINNING_S
        self._crowded_s = _CROWDED_OF_MANY_S if many else _CROWDED_S
        factor = max(1.0, len(members) / _FEW) ** 2
        self._shortest_s = min(factor * _SHORTEST_SLEEP_S, _LONGEST_OF_MANY_S / 8)
        self._longest_s = min(factor * _LONGEST_SLEEP_S, _LONGEST_OF_MANY_S)

    def cross(self, description: int = 0) -> None:
        """Return when all members have arrived.

        Args:
            description: next action of this member, which this barrier publishes.

        Raises:
            CollectiveBroken: one has not, and is gone.
        """
        number = self.crossed = self.crossed + 1
        # Before the number: its store signals to the others that the description is there. Two places, in
        # turn: others may still read the description of the last barrier.
        self._words[self._own + _DESCRIPTION + number % 2] = description
        self._words[self._own] = number
        if min(self._numbers) < number:
            if self.patient or not self._spin(number):
                self._sleep(number)
            return
        # Several may see that all have arrived, and write the same number. It changes the word that the
        # others sleep at, so one that is about to fall asleep does not.
        self._last.write(number)
        if any(self._asleep):
            self._last.wake()

    def descriptions(self) -> list[int]:
        """Return all members' descriptions, as published by the last barrier."""
        return list(self._words[_DESCRIPTION + self.crossed % 2 :: LINE_WORDS])

    def leave(self) -> None:
        """Notify the others not to wait for this member any more."""
        if self._words[self._own + _STATE] == _PRESENT:
            self._words[self._own + _STATE] = _LEFT
            self._last.wake()

    def give_up(self, lost: int) -> None:
        """Notify the others that this member cannot continue, because of a rank that is gone (its own, if it failed).

        Args:
            lost: the rank; `UNKNOWN_RANK` if this member gives up without naming one.
        """
        self._words[self._own + _STATE] = _REVOKED if lost == UNKNOWN_RANK else _BROKEN + lost
        self._last.wake()

    def _spin(self, number: int) -> bool:
        """Wait as long as that may be short; return whether all have arrived."""
        began = looked = time.perf_counter()
        while min(self._numbers) < number:
            os.sched_yield()
            before, looked = looked, time.perf_counter()
            if looked - began > self._spinning_s or looked - before > self._crowded_s:
                return False
        return True

    def _sleep(self, number: int) -> None:
        # Set before the numbers are read again: the last member stores its number and then looks for
        # sleepers, so either it wakes this one, or this one sees its number.
        self._words[self._own + _ASLEEP] = 1
        longest_s = self._shortest_s
        try:
            while True:
                # Before the numbers: if the last member arrives after this look the word has changed, and the
                # kernel does not put to sleep.
                last = self._last.read()
                if min(self._numbers) >= number:
                    return
                self._miss(number)
                self._last.sleep(last, longest_s)
                longest_s = min(2 * longest_s, self._longest_s)
        finally:
            self._words[self._own + _ASLEEP] = 0

    def _miss(self, number: int) -> None:
        """Raise `CollectiveBroken` if a missing member will never arrive."""
        if self.broken is not None:
            raise self.broken
        ended = self._lifelines.ended()
        for member, rank in enumerate(self._members):
            state = self._words[member * LINE_WORDS + _STATE]
            # Read last: members that arrived and left since must not count as missing.
            if (state == _PRESENT and member not in ended) or self._words[member * LINE_WORDS] >= number:
                continue
            if state == _REVOKED:
                raise CollectiveBroken(REVOKED)
            if state >= _BROKEN and state - _BROKEN != rank:
                gone = state - _BROKEN
                raise CollectiveBroken(f"rank {rank} misses rank {gone}", gone)
            how = {_PRESENT: "has died", _LEFT: "has left"}.get(state, "has failed")
            raise CollectiveBroken(f"rank {rank} {how}", rank)

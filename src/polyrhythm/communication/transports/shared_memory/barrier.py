"""A barrier of sequence numbers in shared memory.

Every member has a line of its own, which it alone writes: the number of the barrier that it has reached. It passes
when all other numbers are as high.

    member 0   7 ──────────▶ 8 ·· waits ·· ▶ passes
    member 1   7 ──▶ 8 ·· waits ·········· ▶ passes
    member 2   7 ─────────────────────▶ 8  ▶ passes

Whoever waits looks again and again, as long as nobody else wants its core; then, and where others take long, it sleeps
until the last one comes. So several ranks may share a core: one that waits costs the others nothing.

No lock and no atomic operation is needed, only that stores become visible in their order and loads happen in theirs,
as x86 and s390x promise; `strongly_ordered` tells. Other machines (ARM) would need a fence, which Python cannot give.
"""

from __future__ import annotations

import os
import platform
import time

from polyrhythm.communication.transports.collective_broken import REVOKED, UNKNOWN_RANK, CollectiveBroken
from polyrhythm.communication.transports.shared_memory.arena import LINE_WORDS
from polyrhythm.communication.transports.shared_memory.lifelines import Lifelines
from polyrhythm.communication.transports.shared_memory.wake_word import WakeWord

_DESCRIPTION, _STATE, _ASLEEP = 1, 3, 4
_LAST_WORD = 8
"""In the first member's line: the latest barrier that all have reached, as the last of them has seen it."""
_PRESENT, _LEFT, _REVOKED, _BROKEN = 0, 1, 2, 3

_SPINNING_S = 100e-6
_CROWDED_S = 20e-6
"""Who gives its core away for so long shares it."""
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 1e-3, 8e-3
"""At most: to see whether somebody will never come, and to hear what the last one told while one lay down."""


def strongly_ordered() -> bool:
    """Whether this machine keeps the order of stores, and of loads, for others to see."""
    return platform.machine().lower() in ("x86_64", "amd64", "i386", "i686", "s390x")


class Barrier:
    """One member's side of the barrier, and what members say of themselves on their lines.

    Args:
        words: all members' lines.
        member: this one.
        members: the ranks of all members, among all ranks of the run.
        lifelines: of the members' processes, in the same order.

    Attributes:
        crossed: how many barriers this member has passed.
        patient: whether to sleep at once while waiting, because this process has something else to compute.
        broken: why nobody need be waited for any more.
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
        self._last = WakeWord(words, _LAST_WORD)

    def cross(self) -> None:
        """Returns when all members have come.

        Raises:
            CollectiveBroken: one has not, and is gone.
        """
        number = self.crossed = self.crossed + 1
        self._words[self._own] = number
        if min(self._numbers) < number:
            if self.patient or not self._spin(number):
                self._sleep(number)
            return
        self._last.write(number)
        if any(self._asleep):
            self._last.wake()

    def describe(self, description: int) -> None:
        """Writes down what this member is about to do; the next barrier publishes it."""
        self._words[self._own + _DESCRIPTION + (self.crossed + 1) % 2] = description

    def descriptions(self) -> list[int]:
        """Gives what all members wrote down before the last barrier."""
        return list(self._words[_DESCRIPTION + self.crossed % 2 :: LINE_WORDS])

    def leave(self) -> None:
        """Tells the others not to wait for this member any more."""
        if self._words[self._own + _STATE] == _PRESENT:
            self._words[self._own + _STATE] = _LEFT
            self._last.wake()

    def give_up(self, gone: int) -> None:
        """Tells the others that this member cannot go on, because of a rank that is gone (its own, if it failed).

        Args:
            gone: the rank; `UNKNOWN_RANK` if this member gives up without naming one.
        """
        self._words[self._own + _STATE] = _REVOKED if gone == UNKNOWN_RANK else _BROKEN + gone
        self._last.wake()

    def _spin(self, number: int) -> bool:
        """Waits as long as that may be short; gives whether all have come."""
        began = looked = time.perf_counter()
        while min(self._numbers) < number:
            os.sched_yield()
            before, looked = looked, time.perf_counter()
            if looked - began > _SPINNING_S or looked - before > _CROWDED_S:
                return False
        return True

    def _sleep(self, number: int) -> None:
        self._words[self._own + _ASLEEP] = 1
        longest_s = _SHORTEST_SLEEP_S
        try:
            while True:
                last = self._last.read()
                if min(self._numbers) >= number:
                    return
                self._miss(number)
                self._last.sleep(last, longest_s)
                longest_s = min(2 * longest_s, _LONGEST_SLEEP_S)
        finally:
            self._words[self._own + _ASLEEP] = 0

    def _miss(self, number: int) -> None:
        """Looks whether somebody who has not come will never come."""
        if self.broken is not None:
            raise self.broken
        ended = self._lifelines.ended()
        for member, rank in enumerate(self._members):
            state = self._words[member * LINE_WORDS + _STATE]
            # Asked last: who came and went since must not be taken for missing.
            if (state == _PRESENT and member not in ended) or self._words[member * LINE_WORDS] >= number:
                continue
            if state == _REVOKED:
                raise CollectiveBroken(REVOKED)
            if state >= _BROKEN and state - _BROKEN != rank:
                gone = state - _BROKEN
                raise CollectiveBroken(f"rank {rank} misses rank {gone}", gone)
            how = {_PRESENT: "has died", _LEFT: "has left"}.get(state, "has failed")
            raise CollectiveBroken(f"rank {rank} {how}", rank)

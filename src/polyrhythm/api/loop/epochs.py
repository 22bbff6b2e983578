"""A loop's epochs, of which its worker may have been lost in the middle, and begun anew.

    worker 0   ◇ epoch 3 ─────────────── ◇ epoch 4 ─────── ◇ epoch 5
    worker 1   ◇ epoch 3 ─── ✝              its successor ▷ ◇ epoch 5        where workers go in step
    worker 1   ◇ epoch 3 ─── ✝  ▷ ── its rest ── ◇ epoch 5                   where each goes at its own pace

Whoever comes first to the beginning of an epoch (◇) leaves a mark for all: who has a share of it, and where the loop
is. So all deal it out alike, though they hear of a loss at different moments, and nobody waits for anybody.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from polyrhythm.api.loop.bulletin import Bulletin
from polyrhythm.api.loop.course import Course
from polyrhythm.api.loop.mark import Mark
from polyrhythm.launch.script.meeting import begun_key


@dataclass(frozen=True)
class Begun:
    """The beginning of an epoch.

    Attributes:
        loop: how many loops over epochs the script has been through before.
        epoch: in this loop.
        steps: that the worker had taken, or worker 0.
    """

    loop: int
    epoch: int
    steps: int

    def to_text(self) -> str:
        """Writes it for the store."""
        return json.dumps([self.loop, self.epoch, self.steps])

    @classmethod
    def from_text(cls, text: str | None) -> Begun:
        """Reads what `to_text` wrote; without it, the very first."""
        return cls(0, 0, 0) if text is None else cls(*json.loads(text))


class Entry(Protocol):
    """How a worker comes among the others.

    Attributes:
        rejoins: whether it is a successor, and the others are under way.
        waits: whether successors wait for the beginning of an epoch.
    """

    rejoins: bool
    waits: bool

    def let_in(self, begun: Begun, entering: Sequence[int]) -> None:
        """Lets those in who wait, if this worker leads."""

    def entered(self) -> Begun:
        """Says that this worker, a successor, is there; gives the epoch with which it begins."""

    def present(self) -> tuple[list[int], list[int]]:
        """Gives the workers that are to have a share of what begins, and who of them wait to be let in."""

    def go_on(self, begun: Begun) -> None:
        """An epoch begins in which this worker, a successor, takes what is left of its share."""

    def begins(self, begun: Begun) -> None:
        """An epoch begins for this worker."""


class Epochs:
    """Goes through the epochs of one worker's loop.

    Args:
        worker: its index.
        bulletin: where marks are left.
        course: how far its loop has come.
        entry: how it comes among the others.

    Attributes:
        present: the workers that have a share of the epoch under way; None outside of epochs.
    """

    def __init__(self, worker: int, bulletin: Bulletin, course: Course, entry: Entry) -> None:
        self.present: tuple[int, ...] | None = None
        self._worker = worker
        self._bulletin = bulletin
        self._course = course
        self._entry = entry
        self._loops = 0
        self._entered: Begun | None = None

    def through(self, count: int, start: Callable[[], object]) -> Iterator[int]:
        """Gives the epochs of a loop in which this worker has a share.

        Args:
            count: of epochs.
            start: starts the replica, with the others; a successor is among them when it returns.
        """
        loop, self._loops = self._loops, self._loops + 1
        start()
        if self._entry.rejoins and self._entered is None:
            self._entered = self._entry.entered()
        entered = self._entered
        if entered is None or loop > entered.loop:
            return self._epochs(loop, range(count), None)
        if loop < entered.loop:  # which its predecessor was through with
            return iter(())
        return self._epochs(loop, range(entered.epoch, count), entered)

    def _epochs(self, loop: int, epochs: range, entered: Begun | None) -> Iterator[int]:
        behind = entered is not None
        away = False  # who had no share of an epoch does not know where the loop is after it
        try:
            for epoch in epochs:
                mark = self._mark(loop, epoch, away=away)
                if mark is None:  # the others have left the loop early
                    return
                if behind:
                    self._course.go_to(mark)
                away = behind = self._worker not in mark.present
                if away:
                    continue
                self.present = mark.present
                self._begin(Begun(loop, epoch, mark.steps), mark, entered)
                behind = entered is not None  # what it steps each batch was stepped by another
                entered = None
                yield epoch
        finally:
            self._end(loop, away=away)

    def _begin(self, begun: Begun, mark: Mark, entered: Begun | None) -> None:
        """Comes to the beginning of an epoch, or into the middle of one."""
        assert self._course.optimizer is not None, "a loop has something to train"
        own = replace(begun, steps=self._course.optimizer.steps) if entered is None else entered
        self._entry.begins(own)
        if entered is not None:
            self._entry.go_on(entered)
        else:
            self._bulletin.post(begun_key(self._worker), own.to_text())
        self._entry.let_in(begun, mark.entering)

    def _mark(self, loop: int, epoch: int, *, away: bool) -> Mark | None:
        key, end = f"script/epochs/{loop}/{epoch}", _end_key(loop)
        if away:
            self._bulletin.await_one([key, end], "the others to begin the next epoch")
            text = self._bulletin.read(key)
            return None if text is None else Mark.from_text(text)
        present, entering = self._entry.present()
        return Mark.from_text(
            self._bulletin.post_if_absent(key, self._course.mark(present, entering).to_text())
        )

    def _end(self, loop: int, *, away: bool) -> None:
        self.present = None
        if away:
            text = self._bulletin.await_one([_end_key(loop)], "the others to end the loop")
            self._course.go_to(Mark.from_text(text))
        else:
            self._bulletin.post_if_absent(_end_key(loop), self._course.mark((), ()).to_text())


def _end_key(loop: int) -> str:
    return f"script/epochs/{loop}/end"

"""How much of the epoch under way a worker has taken, and where that is noted for a successor of worker 0."""

from __future__ import annotations

from polyrhythm.api.loop.course import Course
from polyrhythm.api.loop.epochs import Begun
from polyrhythm.api.loop.position import ALL, UNKNOWN, Logbook


class Progress:
    """Counts the training batches of one worker in the epoch under way, over all shards together.

    Args:
        course: of its loop.
        logbook: takes the loop's positions; None where nobody will ask for them.

    Attributes:
        course: as given.
        at: the epoch under way, or the last one; None before the first.
        leaves_out: batches of it that whoever came before has taken, and that no share has left out yet.
    """

    def __init__(self, course: Course, logbook: Logbook | None) -> None:
        self.at: Begun | None = None
        self.leaves_out = 0
        self.course = course
        self._logbook = logbook
        self._taken = self._taken_by_steps = 0
        self._seated_in: Begun | None = None

    def begin(self, at: Begun) -> None:
        """An epoch begins, of which nothing is taken yet, nor left out."""
        self.at = at
        self.leaves_out = self._taken = self._taken_by_steps = 0

    def be_seated(self) -> int:
        """A share of the epoch begins; gives how many of its batches may be left out, which may be more than it has."""
        self._seated_in = self.at
        return self.leaves_out

    def left_out(self, batches: int) -> None:
        """So many batches of a share need not be taken again."""
        self.leaves_out -= batches
        self._taken += batches
        self._taken_by_steps = self._taken

    def took(self) -> None:
        """One more batch is taken."""
        self._taken += 1

    def through(self, *, broken_off: bool) -> None:
        """A share is handed out to its end, or the user has broken off; an iterator that was kept may say so late."""
        if self._seated_in is self.at:
            self._note(ALL if broken_off else self._taken, at_end=True)

    def step_begins(self) -> None:
        """A step is about to be taken, of the batches since the one before."""
        self._note(self._taken_by_steps)

    def step_done(self) -> None:
        """A step has been taken."""
        self._taken_by_steps = self._taken

    def leave(self) -> None:
        """No more steps will be taken."""
        self._note(ALL, at_end=True)

    def _note(self, taken: int, *, at_end: bool = False) -> None:
        at, optimizer = self.at, self.course.optimizer
        if self._logbook is None or at is None or optimizer is None:
            return
        unknown = not self._taken and optimizer.steps > at.steps
        known = UNKNOWN if unknown else taken
        self._logbook.note(self.course.position((at.loop, at.epoch), known, at_end=at_end))

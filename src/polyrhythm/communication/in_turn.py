"""Works of one rank in the background, one after the other in the order of their start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyrhythm.communication.communicator import Handle

Start = Callable[[Callable[[], Any]], Handle]
"""Runs a work in the background, as `Communicator.start` does."""


class InTurn:
    """A queue of works. One that fails makes all that wait behind it fail with the same error."""

    def __init__(self) -> None:
        self._last: Handle | None = None

    def start(self, start: Start, work: Callable[[], Any]) -> Handle:
        """Lets `work` begin when all that were started before it have ended.

        Args:
            start: runs it in the background.
            work: what to do.
        """
        before = [self._last] if self._last is not None and not self._last.done() else []

        def run() -> Any:
            while before:  # taken out, so that no chain of ended works is kept
                before.pop().wait()
            return work()

        self._last = start(run)
        return self._last

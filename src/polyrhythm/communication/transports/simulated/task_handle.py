"""Handles on what a simulated rank does in the background."""

from __future__ import annotations

from typing import Any

from polyrhythm.communication.transports.simulated.virtual_time import Task, VirtualTime


class TaskHandle:
    """A task under way in virtual time."""

    def __init__(self, time: VirtualTime, task: Task) -> None:
        self._time = time
        self._task = task

    def done(self) -> bool:
        """Whether the task has ended."""
        return self._task.ended

    def wait(self) -> Any:
        """Parks until the task has ended; gives its result."""
        return self._time.join(self._task)

"""Where the time of every worker's steps went, and how much of its communication was waiting for slower workers.

Whoever stands still least in a step waits for nobody. So where workers take their steps together, that one's time
inside the communicator is taken to be what everyone's transfer costs, step by step, and what others stood still longer
is waiting. Where workers run free, nobody can tell the two apart: all is communication.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyrhythm.events import WorkerTimings

PARTS = ("data", "forward", "backward", "update", "communication", "waiting", "other")
"""Into which a step's time is divided: they add up to it."""
_OPEN_STEPS = 10_000


@dataclass(frozen=True)
class StepParts:
    """What the steps of one worker went into.

    Attributes:
        worker: its index.
        steps: that it has taken.
        seconds: by the names of `PARTS`.
    """

    worker: int
    steps: int
    seconds: dict[str, float]

    @property
    def total_s(self) -> float:
        """All seconds of its steps."""
        return sum(self.seconds.values())

    def to_json(self) -> dict[str, Any]:
        """Gives it as a JSON-able dict."""
        parts = {f"{part}_s": self.seconds[part] for part in PARTS}
        return {"worker": self.worker, "steps": self.steps, "seconds": self.total_s, **parts}


class Timings:
    """Adds up what workers tell, in bounded memory.

    Attributes:
        tells_waiting: whether waiting could be told from communication.
    """

    def __init__(self) -> None:
        self.tells_waiting = False
        self._steps: Counter[int] = Counter()
        self._seconds: dict[int, dict[str, float]] = {}
        self._waiting_s: dict[int, float] = {}
        self._open: dict[int, dict[int, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, event: WorkerTimings, workers: int) -> None:
        """Takes what a worker tells.

        Args:
            event: says it.
            workers: who are there and tell of every step, where they go in step.
        """
        told = self._seconds.setdefault(event.worker, dict.fromkeys(PARTS, 0.0))
        self._steps[event.worker] += event.steps
        for part in PARTS:
            told[part] += getattr(event, f"{part}_s", 0.0)
        self.tells_waiting = event.in_step
        for step, seconds in event.communication:
            stood_still = self._open.setdefault(int(step), {})
            stood_still[event.worker] = seconds
            if len(stood_still) >= workers:
                _close(self._open.pop(int(step)), self._waiting_s)
        while len(self._open) > _OPEN_STEPS:
            _close(self._open.pop(next(iter(self._open))), self._waiting_s)

    def of_workers(self) -> list[StepParts]:
        """Gives what the steps of every worker went into, in the order of the workers."""
        waiting_s = self._waiting_s.copy()
        for stood_still in self._open.values():  # of which somebody who is gone will not tell
            _close(stood_still, waiting_s)
        found = []
        for worker, told in sorted(self._seconds.items()):
            waited_s = waiting_s.get(worker, 0.0)
            seconds = told | {"communication": told["communication"] - waited_s, "waiting": waited_s}
            found.append(StepParts(worker, self._steps[worker], seconds))
        return found

    def to_json(self) -> dict[str, Any]:
        """Gives them as a JSON-able dict."""
        workers = [parts.to_json() for parts in self.of_workers()]
        return {"tells_waiting": self.tells_waiting, "workers": workers}


def _close(stood_still: dict[int, float], waiting_s: dict[int, float]) -> None:
    """Adds to each worker's waiting what it stood still longer in a step than the one who did so least."""
    least_s = min(stood_still.values())
    for worker, seconds in stood_still.items():
        waiting_s[worker] = waiting_s.get(worker, 0.0) + seconds - least_s

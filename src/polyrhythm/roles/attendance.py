"""Which workers are there, and what those who are not had done."""

from __future__ import annotations

from collections import Counter
from typing import Any

from polyrhythm.events import WorkerProgress

_SUMS = ("lost", "joined", "images_of_lost", "steps_of_lost")
_COUNTED = ("losses", "step", "images", "steps")


class Attendance:
    """The leader's list of workers.

    Args:
        workers: how many there are.

    Attributes:
        present: the indices of those who take part.
        lost: how often a worker was lost.
        joined: how often a successor came.
        images_of_lost: seen by lost workers in this session, as far as they had said so.
        steps_of_lost: the same of their steps.
    """

    def __init__(self, workers: int) -> None:
        self.present = set(range(workers))
        self.lost = 0
        self.joined = 0
        self.images_of_lost = 0
        self.steps_of_lost = 0
        self._losses: Counter[int] = Counter()
        self._step: Counter[int] = Counter()
        self._images: Counter[int] = Counter()
        self._steps: Counter[int] = Counter()

    def note(self, event: WorkerProgress) -> None:
        """Notes what a worker says of itself."""
        self._step[event.worker] = event.step
        self._steps[event.worker] += event.steps
        self._images[event.worker] += event.images

    def lose(self, worker: int) -> int:
        """Strikes a worker off; gives the step after which it was last heard of."""
        self.present.discard(worker)
        self.lost += 1
        self._losses[worker] += 1
        self.images_of_lost += self._images.pop(worker, 0)
        self.steps_of_lost += self._steps.pop(worker, 0)
        return self.last_step(worker)

    def last_step(self, worker: int) -> int:
        """Gives the steps that a worker was last heard to have done."""
        return self._step[worker]

    def losses(self, worker: int) -> int:
        """Gives how often a worker was lost."""
        return self._losses[worker]

    def join(self, worker: int) -> None:
        """Enters a successor."""
        self.present.add(worker)
        self.joined += 1

    def to_json(self) -> dict[str, Any]:
        """Gives the list as a JSON-able dict."""
        counted = {name: dict(getattr(self, f"_{name}")) for name in _COUNTED}
        return {"present": sorted(self.present), **{name: getattr(self, name) for name in _SUMS}, **counted}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Attendance:
        """Reads what `to_json` gave."""
        made = cls(0)
        made.present = set(told["present"])
        for name in _SUMS:
            setattr(made, name, told[name])
        for name in _COUNTED:
            getattr(made, f"_{name}").update({int(worker): count for worker, count in told[name].items()})
        return made

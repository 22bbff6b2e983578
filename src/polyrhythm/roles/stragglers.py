"""Stragglers: workers whose own steps take much longer than the others', as the leader hears of them.

    own time of a step = (time between two reports - waiting - pauses) / steps,   over the last `REPORTS` reports
    straggler          = own time > median * (1 + max(EXCESS, SPREAD / sqrt(steps)))

The second term keeps drawn step times, whose spread is as large as their mean, from being taken for slowness.
"""

from __future__ import annotations

from collections import deque
from math import sqrt
from statistics import median_low

from polyrhythm.events import Straggler, WorkerProgress

REPORTS = 3
EXCESS, SPREAD = 0.5, 5.0
_ENOUGH = 0.5
"""Of the excess: whoever has less than this share of it keeps up again."""


class Stragglers:
    """The leader's view of how fast everyone is."""

    def __init__(self) -> None:
        self._reported_s: dict[int, tuple[float, float]] = {}
        self._stretches: dict[int, deque[tuple[float, int]]] = {}
        self._step_s: dict[int, float] = {}
        self._named: set[int] = set()
        self._usual_s = 0.0
        self._since_usual = 0

    def hear(self, event: WorkerProgress, paused_s: float = 0.0) -> Straggler | None:
        """Takes what a worker says of itself; gives what there is to say of it.

        Args:
            event: of the worker.
            paused_s: for which it has not trained since it began, as the leader while it tests.
        """
        worker = event.worker
        before = self._reported_s.get(worker)
        self._reported_s[worker] = event.time_s, paused_s
        if before is None or not event.steps:  # the first report is of a warm-up
            return None
        own_s = event.time_s - before[0] - (paused_s - before[1]) - event.wait_s
        stretches = self._stretches.setdefault(worker, deque(maxlen=REPORTS))
        stretches.append((max(0.0, own_s), event.steps))
        steps = sum(count for _, count in stretches)
        self._step_s[worker] = sum(seconds for seconds, _ in stretches) / steps
        if len(stretches) < REPORTS or len(self._step_s) == 1:
            return None
        return self._judge(event, steps)

    def forget(self, worker: int) -> None:
        """A worker is gone; its successor is another."""
        for known in (self._reported_s, self._stretches, self._step_s):
            known.pop(worker, None)
        self._named.discard(worker)

    def _judge(self, event: WorkerProgress, steps: int) -> Straggler | None:
        usual_s = self._usual()
        if usual_s <= 0:
            return None
        worker, slowdown = event.worker, self._step_s[event.worker] / usual_s
        excess = max(EXCESS, SPREAD / sqrt(steps))
        if worker not in self._named and slowdown > 1 + excess:
            self._named.add(worker)
            step_s = self._step_s[worker]
            text = (
                f"worker {worker} is a straggler: its own part of a step takes {step_s:.3g} s, {slowdown:.1f} times "
                f"the median's {usual_s:.3g} s"
            )
        elif worker in self._named and slowdown < 1 + _ENOUGH * excess:
            self._named.remove(worker)
            text = f"worker {worker} keeps up again"
        else:
            return None
        return Straggler(time_s=event.time_s, worker=worker, slowdown=slowdown, text=text)

    def _usual(self) -> float:
        """Gives the median over workers; of very many it is taken anew only when all have reported once more."""
        self._since_usual += 1
        if self._since_usual >= len(self._step_s) // 2 or not self._usual_s:
            self._since_usual = 0
            self._usual_s = median_low(self._step_s.values())
        return self._usual_s

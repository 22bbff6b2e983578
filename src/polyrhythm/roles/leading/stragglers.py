"""Stragglers: workers whose own steps take much longer than the others', as the leader hears of them.

    own time of a step = (time between two reports - waiting - pauses) / steps,   over the last `WINDOW_S` seconds
    straggler          = own time > median * (1 + max(EXCESS, SPREAD / sqrt(steps)))

The second term keeps drawn step times, whose spread is as large as their mean, from being taken for slowness.
"""

from __future__ import annotations

from collections import deque
from math import sqrt
from statistics import median_low
from typing import NamedTuple

from polyrhythm.events import Straggler, WorkerProgress

REPORTS, WINDOW_S = 3, 5.0
"""At least so many reports, and so many seconds, are judged by."""

EXCESS, SPREAD = 0.5, 5.0
_ENOUGH = 0.5
"""Of the excess: whoever has less than this share of it keeps up again."""

_WORSE = 1.5
"""Whoever has kept up again is named anew only if it is so many times as slow as it was said to be before."""


class _Stretch(NamedTuple):
    seconds: float
    own_s: float
    steps: int


class Stragglers:
    """The leader's view of how fast everyone is."""

    def __init__(self) -> None:
        self._reported_s: dict[int, tuple[float, float]] = {}
        self._stretches: dict[int, deque[_Stretch]] = {}
        self._step_s: dict[int, float] = {}
        self._named: set[int] = set()
        self._said: dict[int, float] = {}
        self._usual_s = 0.0
        self._since_usual = 0

    def on_progress(self, event: WorkerProgress, paused_s: float = 0.0) -> Straggler | None:
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
        seconds = event.time_s - before[0] - (paused_s - before[1])
        stretches = self._stretches.setdefault(worker, deque())
        stretches.append(_Stretch(seconds, max(0.0, seconds - event.wait_s), event.steps))
        lengths_s = [each.seconds for each in stretches]
        while len(lengths_s) > REPORTS and sum(lengths_s[1:]) >= WINDOW_S:
            stretches.popleft()
            del lengths_s[0]
        steps = sum([each.steps for each in stretches])
        self._step_s[worker] = sum([each.own_s for each in stretches]) / steps
        enough = len(stretches) >= REPORTS and sum(lengths_s) >= WINDOW_S
        return self._judge(event, steps) if enough and len(self._step_s) > 1 else None

    def forget(self, worker: int) -> None:
        """A worker is gone; its successor is another."""
        for known in (self._reported_s, self._stretches, self._step_s, self._said):
            known.pop(worker, None)
        self._named.discard(worker)

    def _judge(self, event: WorkerProgress, steps: int) -> Straggler | None:
        usual_s = self._usual()
        if usual_s <= 0:
            return None
        worker, slowdown = event.worker, self._step_s[event.worker] / usual_s
        excess = max(EXCESS, SPREAD / sqrt(steps))
        if worker not in self._named and slowdown > max(1 + excess, _WORSE * self._said.get(worker, 0.0)):
            self._named.add(worker)
            self._said[worker] = slowdown
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

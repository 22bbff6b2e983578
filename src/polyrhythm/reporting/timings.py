"""Phases of every worker's step time, and the share spent waiting for slower workers.

The table of it is the same on the terminal and in the report.

The worker with the shortest blocking time in a step waits for no other. So where workers are synchronous, its time
inside the communicator is taken as the cost of everyone's transfer, step by step, and any longer blocking time of
others is waiting. With asynchronous workers the two cannot be separated: all is communication.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyrhythm.reporting.quantities import UNKNOWN, percent, whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from polyrhythm.events import WorkerTimings


_REPORTED = ("data", "forward", "backward", "update", "communication", "other")
PARTS = (*_REPORTED[:-1], "waiting", "other")
"""Into which a step's time is divided: they add up to it. Waiting is found by comparing the workers' reports."""
_OPEN_STEPS = 10_000


@dataclass(frozen=True)
class StepParts:
    """Seconds of each phase of one worker's steps, by the names of `PARTS`."""

    worker: int
    steps: int
    seconds: dict[str, float]

    @property
    def total_s(self) -> float:
        """All seconds of its steps."""
        return sum(self.seconds.values())

    def to_json(self) -> dict[str, Any]:
        """Return the figures as a JSON-able dict."""
        parts = {f"{part}_s": self.seconds[part] for part in PARTS}
        return {"worker": self.worker, "steps": self.steps, "seconds": self.total_s, **parts}


class Timings:
    """Sums over workers' reports, in bounded memory; `shows_waiting`: waiting is separated from communication."""

    def __init__(self) -> None:
        self.shows_waiting = False
        self._steps: Counter[int] = Counter()
        self._seconds: dict[int, dict[str, float]] = {}
        self._waiting_s: dict[int, float] = {}
        self._open: dict[int, dict[int, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, event: WorkerTimings, workers: int) -> None:
        """Add a report; `workers` is the number of workers that report every step, where they are synchronous."""
        phases = self._seconds.setdefault(event.worker, dict.fromkeys(PARTS, 0.0))
        self._steps[event.worker] += event.steps
        for part in _REPORTED:
            phases[part] += getattr(event, f"{part}_s")
        self.shows_waiting = event.in_step
        for step, seconds in event.communication:
            stopped = self._open.setdefault(int(step), {})
            stopped[event.worker] = seconds
            if len(stopped) >= workers:
                _close(self._open.pop(int(step)), self._waiting_s)
        while len(self._open) > _OPEN_STEPS:
            _close(self._open.pop(next(iter(self._open))), self._waiting_s)

    @property
    def data_s(self) -> float:
        """For how many seconds all workers waited for batches."""
        return sum(phases["data"] for phases in self._seconds.values())

    def of_workers(self) -> list[StepParts]:
        """Return the phases of the steps of every worker, in the order of the workers."""
        waiting_s = self._waiting_s.copy()
        for stopped in self._open.values():  # a failed worker will not complete its own
            _close(stopped, waiting_s)
        found = []
        for worker, phases in sorted(self._seconds.items()):
            waited_s = waiting_s.get(worker, 0.0)
            seconds = phases | {"communication": phases["communication"] - waited_s, "waiting": waited_s}
            found.append(StepParts(worker, self._steps[worker], seconds))
        return found

    def to_json(self) -> dict[str, Any]:
        """Return them as a JSON-able dict."""
        workers = [parts.to_json() for parts in self.of_workers()]
        return {"tells_waiting": self.shows_waiting, "workers": workers}


def _close(stopped: dict[int, float], waiting_s: dict[int, float]) -> None:
    """Add to each worker's waiting time how much longer than the shortest its blocking time in a step was."""
    least_s = min(stopped.values())
    for worker, seconds in stopped.items():
        waiting_s[worker] = waiting_s.get(worker, 0.0) + seconds - least_s


HEADING = "Where a step's time goes, in milliseconds"
_MOST_WORKERS = 16
_COLUMNS = ("seconds", *(f"{part}_s" for part in PARTS))


def timing_table(timings: Mapping[str, Any]) -> list[list[str]]:
    """Return `Timings.to_json` as rows of text: a head, the workers, their mean, and each part's share."""
    workers: Sequence[Mapping[str, Any]] = timings["workers"]
    rows = [["worker", "steps", "step", *PARTS]]
    for worker in workers[:_MOST_WORKERS]:
        rows.append([str(worker["worker"]), *_cells(worker, timings["tells_waiting"])])
    if len(workers) > _MOST_WORKERS:
        rows.append([f"{len(workers) - _MOST_WORKERS:,} more", *[""] * (len(rows[0]) - 1)])
    together = {name: sum(worker[name] for worker in workers) for name in ("steps", *_COLUMNS)}
    if len(workers) > 1:
        rows.append(["all", *_cells(together, timings["tells_waiting"])])
    total_s = together["seconds"] or float("nan")
    shares = [percent(together[name] / total_s) for name in _COLUMNS]
    rows.append(["share", "", *_known(shares, timings["tells_waiting"])])
    return rows


def timing_lines(timings: Mapping[str, Any]) -> list[str]:
    """Write timings as lines of equal width, below a heading."""
    rows = timing_table(timings)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [HEADING, *lines]


def remark(timings: Mapping[str, Any]) -> str:
    """Return a remark on how to read communication and waiting."""
    if timings["tells_waiting"]:
        return (
            "Communication: the shortest pause of any worker in a step; waiting: the longer pauses of the others. "
            "Neither includes what was overlapped with computing."
        )
    return "Asynchronous workers: communication includes waiting, but not what was overlapped with computing."


def _cells(worker: Mapping[str, Any], shows_waiting: bool) -> list[str]:
    steps = worker["steps"]
    milliseconds = [f"{1000 * worker[name] / steps:.2f}" if steps else UNKNOWN for name in _COLUMNS]
    return [whole(steps), *_known(milliseconds, shows_waiting)]


def _known(cells: list[str], shows_waiting: bool) -> list[str]:
    if not shows_waiting:
        cells[_COLUMNS.index("waiting_s")] = UNKNOWN
    return cells

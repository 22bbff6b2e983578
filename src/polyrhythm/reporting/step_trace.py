"""The trace of a real run's first steps: what every worker did when, for Perfetto."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyrhythm.chrome_trace import Place, Record, write_trace
from polyrhythm.events import Event, RunStarted, WorkerTimings

if TYPE_CHECKING:
    from pathlib import Path

TRACE_FILE = "trace.json"


class StepTrace:
    """Writes the spans that workers tell; an observer.

    All stand on one line a worker. Time is every worker's own since training started, which all do at about the
    same moment.

    Args:
        path: of the file; written in the end, if there is anything to write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = ""
        self._spans: dict[int, list[Record]] = {}

    def on_event(self, event: Event) -> None:
        """Takes one event."""
        if isinstance(event, RunStarted):
            self._name = f"{event.model} on {event.data}: {event.strategy}"
        if isinstance(event, WorkerTimings) and event.spans:
            told = self._spans.setdefault(event.worker, [])
            told += [Place(0, event.worker).does(what, start, end) for what, start, end in event.spans]

    def close(self) -> None:
        """Writes the file."""
        if not self._spans:
            return
        records: list[Record] = []
        for worker, told in sorted(self._spans.items()):
            records += Place(0, worker).named(self._name, f"worker {worker}") + told
        write_trace(self._path, records)

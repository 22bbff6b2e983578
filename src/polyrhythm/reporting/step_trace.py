"""The trace of a real run's first steps: what every worker did when, for Perfetto."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from polyrhythm.chrome_trace import Record, TraceRank, write_trace
from polyrhythm.claim import UNCLAIMED, Superseded, Unclaimed
from polyrhythm.events import Event, RunStarted, WorkerTimings

if TYPE_CHECKING:
    from pathlib import Path

TRACE_FILE = "trace.json"


class StepTrace:
    """An observer that writes the spans of workers, one line each, when it is closed.

    Time is every worker's own since training started, which all do at about the same moment.
    """

    def __init__(self, path: Path, claim: Unclaimed = UNCLAIMED) -> None:
        self._path = path
        self._claim = claim
        self._name = ""
        self._spans: dict[int, list[Record]] = {}

    def on_event(self, event: Event) -> None:
        """Handle one event."""
        if isinstance(event, RunStarted):
            self._name = f"{event.model} on {event.data}: {event.strategy}"
        if isinstance(event, WorkerTimings) and event.spans:
            told = self._spans.setdefault(event.worker, [])
            told += [TraceRank(0, event.worker).does(what, start, end) for what, start, end in event.spans]

    def close(self) -> None:
        """Write the file."""
        if not self._spans or not self._claim.holds():
            return
        records: list[Record] = []
        for worker, told in sorted(self._spans.items()):
            records += TraceRank(0, worker).named(self._name, f"worker {worker}") + told
        with suppress(Superseded):
            write_trace(self._claim.draft(self._path), records)
            self._claim.publish(self._path)

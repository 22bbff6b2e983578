"""A run that has ended, as its folder tells it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from polyrhythm.api.observed_run import Run, run_of
from polyrhythm.events import Restarted, RunEnded, RunStarted
from polyrhythm.reporting.counting.figures import RunFigures
from polyrhythm.reporting.event_log import LOG_FILE, read_events


def finished_run(folder: Path) -> Run | None:
    """Gives the run of a folder if it has ended well, with its figures; None if it has not.

    Raises:
        RequestError: its log is damaged.
    """
    log = folder / LOG_FILE
    events = read_events(log) if log.exists() else []
    last = next((event for event in reversed(events) if isinstance(event, RunStarted | RunEnded)), None)
    if not isinstance(last, RunEnded) or last.outcome != "done":
        return None
    again = [event for event in events if isinstance(event, Restarted)]
    return replace(run_of(folder, last, RunFigures.of(events), again), before=True)

"""Progress where there is no terminal: a plain line now and then, for a log file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TextIO

from polyrhythm.events import (
    Evaluated,
    Notice,
    Restarted,
    RunEnded,
    RunStarted,
    WorkerJoined,
    WorkerLost,
    WorkerProgress,
)
from polyrhythm.reporting.counting.figures import RunFigures
from polyrhythm.reporting.quantities import counted, duration, percent, significant, whole
from polyrhythm.reporting.tables import facts

if TYPE_CHECKING:
    from polyrhythm.events import Event


class PlainProgress:
    """Writes a line at the start, every few seconds of run time, at every test and notice, and at the end.

    Args:
        stream: where the lines go; it is flushed after each, and stays open.
        every_s: seconds of run time between two lines about the workers, if most of them have reported.
    """

    def __init__(self, stream: TextIO, every_s: float = 5.0) -> None:
        self._stream = stream
        self._every_s = every_s
        self._next_s = every_s
        self._figures = RunFigures()

    def on_event(self, event: Event) -> None:
        """Takes one event; writes at most one line."""
        self._figures.add(event)
        match event:
            case RunStarted():
                self._next_s = event.time_s + self._every_s
                self._write(start_line(event))
            case WorkerProgress() if event.time_s >= self._next_s and self._figures.most_reported:
                self._next_s = event.time_s + self._every_s
                self._write(training_line(self._figures))
            case Evaluated():
                self._write(evaluation_line(event, self._figures))
            case Notice() | WorkerLost() | WorkerJoined():
                self._write(f"notice: {event.text}")
            case RunEnded():
                self._write(end_line(event, self._figures))

    def close(self) -> None:
        """Does nothing: every line is out already."""

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def start_line(event: RunStarted) -> str:
    """Says what is about to be trained."""
    size = f" ({whole(event.parameters)} parameters)" if event.parameters else ""
    ranks = counted(event.workers, "worker") + (
        f", {counted(event.servers, 'server')}" if event.servers else ""
    )
    again = f", resumed after epoch {event.start_epoch}" if event.start_epoch else ""
    steps = f"of {counted(event.steps_per_epoch, 'step')}"
    if event.steps not in (0, event.epochs * event.steps_per_epoch):
        steps = f"with {counted(event.steps, 'step')} in all"
    return (
        f"training {event.model}{size} on {event.data}: {event.strategy}, {ranks}, "
        f"{counted(event.epochs, 'epoch')} {steps}{again}"
    )


def training_line(figures: RunFigures) -> str:
    """Says how far the slowest worker is, and how well and how fast all of them train."""
    slowest = min((series.last for series in figures.present), key=lambda stretch: stretch.step)
    parts = [
        f"epoch {slowest.epoch + 1}/{figures.started.epochs if figures.started else '?'}",
        f"step {slowest.step}/{figures.steps_per_worker}",
        *([f"loss {significant(figures.recent_loss)}"] if not math.isnan(figures.recent_loss) else []),
        f"{whole(figures.recent_images_per_s)} images/s",
    ]
    if figures.staleness.counts:
        parts.append(f"staleness {figures.staleness.mean:.1f} (max {figures.staleness.max})")
    return "  ".join([*parts, f"left {duration(figures.time_left_s)}"])


def evaluation_line(event: Evaluated, figures: RunFigures) -> str:
    """Says how good the model is after an epoch."""
    epochs = f"/{figures.started.epochs}" if figures.started else ""
    return (
        f"epoch {event.epoch}{epochs} done  test top-1 {percent(event.test_top1)}  "
        f"top-5 {percent(event.test_top5)}  loss {significant(event.test_loss)}  "
        f"after {duration(event.time_s)}"
    )


def end_line(event: RunEnded, figures: RunFigures) -> str:
    """Says how the run ended, with its main figures."""
    known = facts(figures)
    parts = [f"{event.outcome} after {duration(known['seconds'])}"]
    if "test_top1" in known:
        parts.append(f"test top-1 {percent(known['test_top1'])}")
    if "images_per_s" in known:
        parts.append(f"{whole(known['images_per_s'])} images/s")
    again = [notice.updates_lost for notice in figures.notices if isinstance(notice, Restarted)]
    if again:
        parts.append(f"started again {counted(len(again), 'time')}, {counted(sum(again), 'update')} lost")
    return "  ".join(parts)

"""Progress of a run on the terminal: live where there is one, plain lines elsewhere.

On a terminal that can move its cursor it is a table of the workers that keeps itself up to date; elsewhere a
plain line now and then, for a log file.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, TextIO

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from polyrhythm.errors import printable
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
from polyrhythm.reporting.figures import RunFigures
from polyrhythm.reporting.notices import Notices
from polyrhythm.reporting.quantities import counted, duration, percent, significant, whole
from polyrhythm.reporting.tables import facts

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from polyrhythm.events import Event
    from polyrhythm.reporting.event_log import Observer
    from polyrhythm.reporting.figures import Stretch


VIRTUAL = " (virtual)"
"""Mark after the seconds of a simulation."""


def progress_for(stream: TextIO, *, mark: str = "") -> Observer:
    """Pick the progress that a stream can show: live if it is a terminal that can move its cursor.

    Args:
        stream: output stream.
        mark: suffix of every duration; `VIRTUAL` for a simulation.
    """
    if stream.isatty():
        console = Console(file=stream)
        if not console.is_dumb_terminal:
            return LiveProgress(console, mark=mark)
    return PlainProgress(stream, mark=mark)


REFRESHES_PER_S = 4
QUIET_S = 10.0
_OTHER_LINES = 15  # lines of a drawing that are not rows of its tables, and the prompt


class LiveProgress:
    """Draws the state of all workers and servers in place.

    The last drawing stays on the screen unless the run is done: then its result follows.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic, mark: str = "") -> None:
        self._console = console
        self._mark = mark
        self._clock = clock
        self._figures = RunFigures()
        self._notices = Notices()
        self._received_s = clock()
        self._drawn_s = -1.0
        # Rich draws in a thread of its own, which must not see changing figures: it gets finished drawings.
        self._drawing: RenderableType = Text()
        self._live = Live(
            console=console,
            refresh_per_second=REFRESHES_PER_S,
            get_renderable=self._screen,
            redirect_stdout=False,
        )

    def on_event(self, event: Event) -> None:
        """Handle one event; draw again if the last drawing is old enough."""
        self._figures.add(event)
        self._received_s = self._clock()
        self._print(self._notices.due(event.time_s))
        if isinstance(event, RunStarted):
            self._draw()
            self._live.start()
        elif isinstance(event, Notice | WorkerLost | WorkerJoined):
            self._print(self._notices.add(event.text, event.time_s))
        elif isinstance(event, RunEnded) or self._received_s - self._drawn_s >= 1 / REFRESHES_PER_S:
            self._draw()

    def close(self) -> None:
        """Draw the last state, unless the run is done, and release the terminal."""
        self._print(self._notices.rest())
        self._draw()
        ended = self._figures.ended
        self._live.transient = ended is not None and ended.outcome == "done"
        self._live.stop()

    def _print(self, notices: list[str]) -> None:
        for text in notices:
            self._console.print(Text(f"notice: {text}", style="yellow"))

    def _draw(self) -> None:
        self._drawn_s = self._clock()
        self._drawing = drawing(self._figures, self._console.height, self._mark)

    def _screen(self) -> RenderableType:
        quiet_s = self._clock() - self._received_s
        if self._figures.ended or quiet_s < QUIET_S:
            return self._drawing
        return Group(self._drawing, Text(f" no news from any rank for {duration(quiet_s)}", style="yellow"))


def drawing(figures: RunFigures, height: int, mark: str = "") -> RenderableType:
    """Draw a run; workers and servers for which `height` lines have no room are only counted."""
    room = max(2, height - _OTHER_LINES)
    servers = min(len(figures.versions), max(1, room // 4))
    parts: list[RenderableType] = [_header(figures), Text()]
    if figures.workers:
        parts += [_worker_table(figures, room - servers), Text()]
    if figures.versions:
        parts += [_server_table(figures, servers), Text()]
    if figures.evaluations:
        parts.append(_accuracy(figures))
    parts.append(_bar(figures, mark))
    return Group(*parts)


def _header(figures: RunFigures) -> Text:
    start = figures.started
    if start is None:
        return Text(" starting")
    ranks = counted(start.workers, "worker") + (
        f" + {counted(start.servers, 'server')}" if start.servers else ""
    )
    return Text.assemble(
        " ",
        (f"{start.model} on {start.data}", "bold"),
        f" · {ranks}\n ",
        (start.strategy, "cyan"),
        overflow="fold",
    )


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), header_style="dim", show_edge=False)
    for column in columns:
        # On narrow terminals a heading of two words takes two lines before anything is cut.
        table.add_column(column, justify="right", no_wrap=" " not in column)
    return table


def _add_hidden(table: Table, hidden: int) -> None:
    if hidden > 0:
        table.add_row("…", f"{hidden:,} more", style="dim")


def _worker_table(figures: RunFigures, rows: int) -> Table:
    table = _table("worker", "step", "images/s", "loss", "learning rate", "waiting")
    for worker in sorted(figures.workers)[:rows]:
        name = f"{worker} (lost)" if worker in figures.absent else str(worker)
        table.add_row(name, *_cells(figures.workers[worker].last, figures.steps_per_worker))
    _add_hidden(table, len(figures.workers) - rows)
    return table


def _cells(last: Stretch, steps: int) -> list[str]:
    return [
        f"{last.step:,}/{steps:,}",
        whole(last.images_per_s),
        significant(last.loss),
        significant(last.learning_rate),
        percent(last.waiting_share),
    ]


def _server_table(figures: RunFigures, rows: int) -> Table:
    table = _table("server", "updates", "staleness mean", "max")
    for server in sorted(figures.versions)[:rows]:
        staleness = figures.staleness_of[server]
        mean = f"{staleness.mean:.2f}" if staleness.counts else "–"
        table.add_row(str(server), f"{figures.versions[server]:,}", mean, str(staleness.max))
    _add_hidden(table, len(figures.versions) - rows)
    return table


def _accuracy(figures: RunFigures) -> Text:
    last, highest = figures.evaluations[-1], max(figures.evaluations, key=lambda each: each.test_top1)
    higher = highest.test_top1 > last.test_top1
    return Text.assemble(
        " test top-1 ",
        (percent(last.test_top1), "bold"),
        f" · top-5 {percent(last.test_top5)} · loss {significant(last.test_loss)} · epoch {last.epoch}",
        f" · highest {percent(highest.test_top1)}, epoch {highest.epoch}" if higher else "",
    )


def _bar(figures: RunFigures, mark: str) -> Table:
    if figures.ended:
        known = facts(figures)
        images_per_s = known.get("images_per_s", figures.images_per_s)
        state = f"{figures.ended.outcome} after {duration(known['seconds'])}{mark}"
    else:
        images_per_s = figures.recent_images_per_s
        state = f"{duration(figures.time_s)} gone, {duration(figures.time_left_s)} left{mark}"
    rate = f"{whole(images_per_s)} images/s"
    # Four columns; the bar takes the remaining width.
    line = Table.grid(padding=(0, 1), expand=True)
    for ratio in (None, 1, None, None):
        line.add_column(ratio=ratio, no_wrap=True)
    bar = ProgressBar(total=1.0, completed=figures.fraction_done)
    line.add_row(f" {_epoch(figures)}", bar, rate, state)
    return line


def _epoch(figures: RunFigures) -> str:
    if not figures.started or not figures.workers:
        return ""
    return f"epoch {1 + min(series.last.epoch for series in figures.present)}/{figures.started.epochs}"


class PlainProgress:
    """Writes a line at the start, every `every_s` seconds of run time, at tests and notices, and at an early end."""

    def __init__(self, stream: TextIO, every_s: float = 5.0, mark: str = "") -> None:
        self._stream = stream
        self._mark = mark
        self._every_s = every_s
        self._next_s = every_s
        self._figures = RunFigures()
        self._notices = Notices()

    def on_event(self, event: Event) -> None:
        """Handle one event; write at most one line, and the notices that have waited."""
        self._figures.add(event)
        self._write_notices(self._notices.due(event.time_s))
        match event:
            case RunStarted():
                self._next_s = event.time_s + self._every_s
                self._write(start_line(event))
            case WorkerProgress() if event.time_s >= self._next_s and self._figures.most_reported:
                self._next_s = event.time_s + self._every_s
                self._write(training_line(self._figures) + self._mark)
            case Evaluated():
                self._write(evaluation_line(event, self._figures) + self._mark)
            case Notice() | WorkerLost() | WorkerJoined():
                self._write_notices(self._notices.add(event.text, event.time_s))
            case RunEnded():
                self._write_notices(self._notices.rest())
                if line := end_line(event, self._figures):
                    self._write(line)

    def close(self) -> None:
        """Write the notices that have waited."""
        self._write_notices(self._notices.rest())

    def _write_notices(self, notices: list[str]) -> None:
        for text in notices:
            self._write(f"notice: {text}")

    def _write(self, line: str) -> None:
        print(printable(line), file=self._stream, flush=True)


def start_line(event: RunStarted) -> str:
    """Return a line that describes the run at its start."""
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


def progress_of(figures: RunFigures, slowest: int) -> str:
    """Return how far the run is: the images, where workers draw them, else the slowest worker's steps."""
    if figures.started and figures.started.images:
        return f"{whole(figures.images_seen)} of {whole(figures.started.images)} images"
    return f"step {slowest}/{figures.steps_per_worker}"


def training_line(figures: RunFigures) -> str:
    """Return how far the slowest worker is, and how well and how fast all of them train."""
    slowest = min((series.last for series in figures.present), key=lambda stretch: stretch.step)
    parts = [
        f"epoch {slowest.epoch + 1}/{figures.started.epochs if figures.started else '?'}",
        progress_of(figures, slowest.step),
        *([f"loss {significant(figures.recent_loss)}"] if not math.isnan(figures.recent_loss) else []),
        f"{whole(figures.recent_images_per_s)} images/s",
    ]
    if figures.staleness.counts:
        parts.append(f"staleness {figures.staleness.mean:.1f} (max {figures.staleness.max})")
    return "  ".join([*parts, f"left {duration(figures.time_left_s)}"])


def evaluation_line(event: Evaluated, figures: RunFigures) -> str:
    """Return how good the model is after an epoch."""
    epochs = f"/{figures.started.epochs}" if figures.started else ""
    return (
        f"epoch {event.epoch}{epochs} done  test top-1 {percent(event.test_top1)}  "
        f"top-5 {percent(event.test_top5)}  loss {significant(event.test_loss)}  "
        f"after {duration(event.time_s)}"
    )


def end_line(event: RunEnded, figures: RunFigures) -> str:
    """Return how the run ended; for a finished run, followed by its result, only its restarts."""
    known, parts = facts(figures), []
    if event.outcome != "done":
        parts.append(f"{event.outcome} after {duration(known['seconds'])}")
        parts += [f"test top-1 {percent(known['test_top1'])}"] if "test_top1" in known else []
        parts += [f"{whole(known['images_per_s'])} images/s"] if "images_per_s" in known else []
    again = [notice.updates_lost for notice in figures.notices if isinstance(notice, Restarted)]
    if again:
        parts.append(f"started again {counted(len(again), 'time')}, {counted(sum(again), 'update')} lost")
    return "  ".join(parts)

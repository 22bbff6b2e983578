"""Progress on a terminal: a table of the workers that keeps itself up to date."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from polyrhythm.events import Notice, RunEnded, RunStarted, WorkerJoined, WorkerLost
from polyrhythm.reporting.counting.figures import RunFigures
from polyrhythm.reporting.quantities import counted, duration, percent, significant, whole
from polyrhythm.reporting.tables import facts

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console, RenderableType

    from polyrhythm.events import Event
    from polyrhythm.reporting.counting.stretches import Stretch

REFRESHES_PER_S = 4
QUIET_S = 10.0
_OTHER_LINES = 15  # what a drawing has beside the rows of its tables, and the prompt


class LiveProgress:
    """Draws the state of all workers and servers in place, and leaves the last one on the screen.

    Args:
        console: the terminal to draw on.
        clock: gives seconds on the clock of whoever is watching; a simulated run has another.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._figures = RunFigures()
        self._heard_s = clock()
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
        """Takes one event; draws again if the last drawing is old enough."""
        self._figures.add(event)
        self._heard_s = self._clock()
        if isinstance(event, RunStarted):
            self._draw()
            self._live.start()
        elif isinstance(event, Notice | WorkerLost | WorkerJoined):
            self._console.print(Text(f"notice: {event.text}", style="yellow"))
        elif isinstance(event, RunEnded) or self._heard_s - self._drawn_s >= 1 / REFRESHES_PER_S:
            self._draw()

    def close(self) -> None:
        """Draws the last state and gives the terminal back."""
        self._draw()
        self._live.stop()

    def _draw(self) -> None:
        self._drawn_s = self._clock()
        self._drawing = drawing(self._figures, self._console.height)

    def _screen(self) -> RenderableType:
        quiet_s = self._clock() - self._heard_s
        if self._figures.ended or quiet_s < QUIET_S:
            return self._drawing
        return Group(self._drawing, Text(f" no news from any rank for {duration(quiet_s)}", style="yellow"))


def drawing(figures: RunFigures, height: int) -> RenderableType:
    """Draws a run: what is trained, its workers, its servers, the latest test, and how far it is.

    Args:
        figures: of the run.
        height: lines of the terminal; workers and servers that find no room are only counted.
    """
    room = max(2, height - _OTHER_LINES)
    servers = min(len(figures.versions), max(1, room // 4))
    parts: list[RenderableType] = [_header(figures), Text()]
    if figures.workers:
        parts += [_worker_table(figures, room - servers), Text()]
    if figures.versions:
        parts += [_server_table(figures, servers), Text()]
    if figures.evaluations:
        parts.append(_accuracy(figures))
    parts.append(_bar(figures))
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
        # Where it is narrow, a head of two words takes two lines before anything is cut.
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
    last = figures.evaluations[-1]
    return Text.assemble(
        " test top-1 ",
        (percent(last.test_top1), "bold green"),
        f" · top-5 {percent(last.test_top5)} · loss {significant(last.test_loss)} · epoch {last.epoch}",
    )


def _bar(figures: RunFigures) -> Table:
    if figures.ended:
        known = facts(figures)
        images_per_s = known.get("images_per_s", figures.images_per_s)
        state = f"{figures.ended.outcome} after {duration(known['seconds'])}"
    else:
        images_per_s = figures.recent_images_per_s
        state = f"{duration(figures.time_s)} gone, {duration(figures.time_left_s)} left"
    rate = f"{whole(images_per_s)} images/s"
    # Four columns, of which the bar takes what the others leave.
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

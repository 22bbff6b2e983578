"""Progress for whoever watches: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from rich.console import Console

from polyrhythm.reporting.terminal.live_progress import LiveProgress
from polyrhythm.reporting.terminal.plain_progress import PlainProgress

if TYPE_CHECKING:
    from polyrhythm.reporting.observer import Observer

__all__ = ["LiveProgress", "PlainProgress", "progress_for"]


def progress_for(stream: TextIO) -> Observer:
    """Picks the progress that a stream can show: live if it is a terminal that can move its cursor."""
    if stream.isatty():
        console = Console(file=stream)
        if not console.is_dumb_terminal:
            return LiveProgress(console)
    return PlainProgress(stream)

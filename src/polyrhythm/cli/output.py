"""Output of the command line: one JSON object or a table on standard output, everything else on standard error."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from polyrhythm.escaping import json_text, shell
from polyrhythm.reporting.quantities import percent

WIDTH = 100
"""Columns of what is printed, at most."""
_LABEL, _HELD = 12, "\N{NO-BREAK SPACE}"

UNBROKEN = ("name", "paper", "strategy", "layer")
"""Columns of names, which are unreadable when wrapped."""
JSON_HELP = "Print exactly one JSON object on standard output."


def width() -> int:
    """Return the width of what is printed: the terminal's, and at most 100 columns."""
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def print_progress(text: str) -> None:
    """Print a line of progress at once, on standard error."""
    print(wrapped(text, "    "), file=sys.stderr, flush=True)


def print_labeled(label: str, text: str, indent: int = _LABEL) -> None:
    """Print a label and its text, with continuation lines at column `indent`; a long path stays next to its label."""
    head = f"{label:<{indent}}".replace(" ", _HELD)
    print(wrapped(f"{head}{text}", " " * indent) if text else label)


def print_command(label: str, command: str) -> None:
    """Print a command that can be copied whole: its lines are joined by backslashes."""
    lines, room = [""], width() - _LABEL - 2
    for word in map(shell, shlex.split(command)):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > room:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{word}"
    print(f"{label:<{_LABEL}}" + f" \\\n{' ' * _LABEL}".join(lines))


def wrapped(text: str, indent: str = "") -> str:
    """Return a text in lines of at most `width()`, with an indent from the second on.

    Long words stay whole, and so does what is in backticks, so that both can be copied.
    """
    held = re.sub(r"`[^`]*`| (?=%)", lambda found: found[0].replace(" ", _HELD), text)
    lines = textwrap.fill(
        held, width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return lines.replace(_HELD, " ")


def print_json(value: Any) -> None:
    """Print one JSON object (or list), and nothing else."""
    sys.stdout.write(json_text(value, indent=2) + "\n")


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table at most as wide as the terminal, below its title, which may be wider than the table."""
    console = Console(
        markup=False, emoji=False, width=width()
    )  # names of classes and files stand as they are
    if title:
        console.print(title, style="italic", highlight=False, soft_wrap=True)
    table = Table(header_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in UNBROKEN)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_members(figures: dict[str, Any]) -> None:
    """Print the accuracy of an ensemble's members, alone and together."""
    if "members" in figures and figures["ensemble"]:
        print_labeled("members", ", ".join(percent(each["test_top1"]) for each in figures["members"]))
        print_labeled("together", percent(figures["ensemble"]["test_top1"]))


def print_bottleneck(figures: dict[str, Any]) -> None:
    """Print a run's bottleneck with its remedy, and the shares of the workers' time."""
    found = figures["held_back"]
    if found:
        print_labeled("bottleneck", found["problem"])
        if found["remedy"]:
            share = found["remedy_gain"]
            gain = f": up to {100 * share:+.0f} % images/s" if share else ""
            print_labeled("remedy", f"{found['remedy']}{gain}")
        print_labeled("time", found["time"])
        if found["lock_step"]:
            print_labeled("asynchrony", found["lock_step"]["text"])
    if "noise_scale" in figures:
        print_labeled("batch size", figures["noise_scale"]["text"])
    if not found or found["cause"] != "stragglers":
        slowest = sorted(figures["stragglers"].items(), key=lambda each: -each[1])
        for worker, times in slowest[:3]:
            print_labeled("straggler", f"worker {worker}, {times:.1f}× slower than the median")
        if more := slowest[3:]:
            print_labeled("", f"{len(more)} more, {more[-1][1]:.1f}× to {more[0][1]:.1f}× slower")


def print_left_out(figures: dict[str, Any]) -> None:
    """Print the number of dropped gradients and of images that were not trained on."""
    gradients = figures.get("gradients_dropped", 0)  # a head that is fitted on features has none
    images = figures.get("images_not_seen", 0)  # a run without gradients has no images
    parts = [f"{gradients:,} gradient{'s' * (gradients != 1)} too late to count"] * bool(gradients)
    parts += [f"{images:,} image{'s' * (images != 1)} of the epochs not seen"] * bool(images)
    if parts:
        print_labeled("left out", ", ".join(parts))


def print_timings(figures: dict[str, Any]) -> None:
    """Print how the workers' step time was spent, if the figures include timings."""
    from polyrhythm.reporting.timings import remark, timing_lines

    if "timings" in figures:
        print("", *timing_lines(figures["timings"]), wrapped(remark(figures["timings"])), "", sep="\n")


def print_cache(figures: dict[str, Any]) -> None:
    """Print the source of training images, if the figures include the cache."""
    from polyrhythm.reporting.figures import cache_line

    if "cache" in figures:
        print_labeled("cache", cache_line(figures["cache"]))


def print_report_path(folder: Path) -> None:
    """Print the path of the report, if there was room for it on the disk."""
    if (folder / "report.html").exists():
        print_labeled("report", f"{folder}/report.html")


def rate(images_per_s: float) -> str:
    """Format images per second: `1,203`, and `0.3` for very few."""
    return f"{images_per_s:,.0f}" if images_per_s >= 10 else f"{images_per_s:.1f}"

"""Output of the command line: one JSON object or a table on standard output, everything else on standard error."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

UNBROKEN = ("name", "paper", "strategy", "layer")
"""Columns of names, which are unreadable when wrapped."""
JSON_HELP = "Print exactly one JSON object on standard output."


def tell(text: str) -> None:
    """Print a line about what is going on, at once."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print one JSON object (or list), and nothing else."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table at most as wide as the terminal, below its title, which may be wider than the table."""
    console = Console(markup=False, emoji=False)  # names of classes and files stand as they are
    if title:
        console.print(title, style="italic", highlight=False, soft_wrap=True)
    table = Table(header_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in UNBROKEN)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def say_members(figures: dict[str, Any]) -> None:
    """Print what the members of an ensemble came to, alone and together."""
    if "members" in figures and figures["ensemble"]:
        print(f"members     {', '.join(percent(each['test_top1']) for each in figures['members'])}")
        print(f"together    {percent(figures['ensemble']['test_top1'])}")


def say_what_held_back(figures: dict[str, Any]) -> None:
    """Print what held a run back, and which workers straggled."""
    if figures["held_back"]:
        print(f"held back   by {figures['held_back']['text']}")
    if "noise_scale" in figures:
        print(f"batch       {figures['noise_scale']['text']}")
    for worker, times in figures["stragglers"].items():
        print(f"straggler   worker {worker}: its own part of a step took {times:.1f} times the median's")


def say_what_was_left_out(figures: dict[str, Any]) -> None:
    """Print how much of the work did not count: gradients that came too late, and images that nobody took."""
    gradients = figures.get("gradients_dropped", 0)  # a head that is fitted on features has none
    images = figures.get("images_not_seen", 0)  # a run without gradients has no images
    parts = [f"{gradients:,} gradient{'s' * (gradients != 1)} too late to count"] * bool(gradients)
    parts += [f"{images:,} image{'s' * (images != 1)} of the epochs not seen"] * bool(images)
    if parts:
        print(f"left out    {', '.join(parts)}")


def say_timings(figures: dict[str, Any]) -> None:
    """Print how the workers' step time was spent, if the figures include timings."""
    from polyrhythm.reporting.timings import remark, timing_lines

    if "timings" in figures:
        print("", *timing_lines(figures["timings"]), remark(figures["timings"]), "", sep="\n")


def say_cache(figures: dict[str, Any]) -> None:
    """Print where training images came from, if the figures include the cache."""
    from polyrhythm.reporting.figures import cache_line

    if "cache" in figures:
        print(f"cache       {cache_line(figures['cache'])}")


def say_where_the_report_is(folder: Path) -> None:
    """Print the path of the report, if there was room for it on the disk."""
    if (folder / "report.html").exists():
        print(f"report      {folder}/report.html")


def rate(images_per_s: float) -> str:
    """Format images a second: `1,203`, and `0.3` of a few pictures over and over."""
    return f"{images_per_s:,.0f}" if images_per_s >= 10 else f"{images_per_s:.1f}"


def percent(fraction: float) -> str:
    """Format a fraction as a percentage."""
    return f"{100 * fraction:.2f} %"

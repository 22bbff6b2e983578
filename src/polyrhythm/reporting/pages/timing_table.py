"""The table of where a step's time goes: on the terminal and in the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyrhythm.reporting.counting.timings import PARTS
from polyrhythm.reporting.quantities import UNKNOWN, percent, whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HEADING = "Where a step's time goes, in milliseconds"
_MOST_WORKERS = 16
_COLUMNS = ("seconds", *(f"{part}_s" for part in PARTS))


def timing_table(timings: Mapping[str, Any]) -> list[list[str]]:
    """Writes timings as rows of texts: a head, the workers, their mean, and each part's share of all their time.

    Args:
        timings: as `Timings.to_json` gives them.
    """
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
    """Writes timings as lines of equal width, below a heading."""
    rows = timing_table(timings)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [HEADING, *lines]


def remark(timings: Mapping[str, Any]) -> str:
    """Says how communication and waiting are to be read."""
    if timings["tells_waiting"]:
        return (
            "Communication is what the worker that stood still least in a step stood still for it, "
            "waiting what others stood still longer; both only as far as no computing hid them."
        )
    return "Workers do not go in step, so waiting cannot be told from communication; what computing hid is in neither."


def _cells(worker: Mapping[str, Any], tells_waiting: bool) -> list[str]:
    steps = worker["steps"]
    milliseconds = [f"{1000 * worker[name] / steps:.2f}" if steps else UNKNOWN for name in _COLUMNS]
    return [whole(steps), *_known(milliseconds, tells_waiting)]


def _known(cells: list[str], tells_waiting: bool) -> list[str]:
    if not tells_waiting:
        cells[_COLUMNS.index("waiting_s")] = UNKNOWN
    return cells

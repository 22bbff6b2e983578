"""The timeline of one step of all ranks, from the trace that a run has left (simulated, or with `--timings`)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from polyrhythm.reporting.pages.plots import Plot, color

if TYPE_CHECKING:
    from pathlib import Path

_MOST_BYTES, _MOST_RANKS = 50_000_000, 32
_WAITING, _WAIT_COLOR, _COMMUNICATION = "wait", "#b9bec8", "communication"
_ORDER = {"forward": 1, "backward": 2, "weights": 3}
"""Units of a pipeline, as its timeline names them."""
_MARGIN = 0.1
"""Of the step, what is shown before and after it."""


def _microbatch(what: str) -> str:
    """Return the number of the microbatch that `forward 3` is of; empty of other spans."""
    first, _, rest = what.partition(" ")
    number = rest.partition(" ")[0]
    return number if first in _ORDER and number.isdigit() else ""


def _numbered(numbers: list[str]) -> dict[str, Any]:
    return {"text": numbers, "textposition": "inside", "insidetextanchor": "middle", "textangle": 0}


def _worked(spans: list[tuple[int, str, float, float]], begin: float, end: float) -> dict[int, float]:
    """Return which share of a time each rank worked."""
    found: dict[int, float] = {}
    for rank, what, start, stop in spans:
        if _microbatch(what):
            inside = max(0.0, min(stop, end) - max(start, begin))
            found[rank] = found.get(rank, 0.0) + inside / (end - begin)
    return found


def timeline(path: Path) -> Plot | None:
    """Return the plot of a step in the middle of the trace; None without a trace that has one.

    A step lasts from where the first rank begins to do something until it does the same again.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            return None
        records = json.loads(path.read_bytes())["traceEvents"]
        names = {each["tid"]: each["args"]["name"] for each in records if each.get("name") == "thread_name"}
        spans = [
            (each["tid"], each["name"], each["ts"] / 1e6, (each["ts"] + each["dur"]) / 1e6)
            for each in records
            if each.get("ph") == "X"
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    ranks = sorted(names)[:_MOST_RANKS]
    first = sorted((start, what) for rank, what, start, _ in spans if ranks and rank == ranks[0])
    kinds = [what for _, what in first if what != _WAITING]
    starts = [start for start, what in first if kinds and what == kinds[0]]
    if len(starts) < 2:
        return None
    middle = (len(starts) - 1) // 2
    begin, end = starts[middle], starts[middle + 1]
    margin = _MARGIN * (end - begin)
    low, high = begin - margin, end + margin
    shown: dict[str, list[tuple[int, float, float]]] = {}
    for rank, what, start, stop in spans:
        if rank in ranks and start < high and stop > low:
            shown.setdefault(what, []).append((rank, max(start, low), min(stop, high)))
    pipeline = any(_microbatch(what) for what in shown)
    if pipeline:  # what a stage waits for is its own kind of span there
        shown = {what: found for what, found in shown.items() if not what.startswith(_COMMUNICATION)}
    of_kind: dict[str, list[tuple[int, float, float, str]]] = {}
    for what, found in shown.items():
        kind, number = (what.partition(" ")[0], _microbatch(what)) if _microbatch(what) else (what, "")
        of_kind.setdefault(kind, []).extend((*span, number) for span in found)
    ordered = sorted(of_kind, key=lambda what: (what == _WAITING, _ORDER.get(what, 0), what))
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": what,
            "base": [round(1000 * (start - begin), 4) for _, start, _, _ in of_kind[what]],
            "x": [round(1000 * (stop - start), 4) for _, start, stop, _ in of_kind[what]],
            "y": [names[rank] for rank, _, _, _ in of_kind[what]],
            "marker": {"color": _WAIT_COLOR if what == _WAITING else color(index, len(ordered))},
            **(_numbered([number for _, _, _, number in of_kind[what]]) if pipeline else {}),
        }
        for index, what in enumerate(ordered)
    ]
    left_out = f"; the first {_MOST_RANKS} of {len(names)} ranks" if len(names) > _MOST_RANKS else ""
    worked = ""
    if pipeline:
        busy = _worked([(rank, *span) for rank, *span in spans if rank in ranks], begin, end)
        told = ", ".join(f"{names[rank]} {busy.get(rank, 0.0):.0%}" for rank in ranks)
        worked = f" Bars bear the numbers of microbatches; of the step's time, {told} is work, and the rest waiting."
    return Plot(
        title="A step of the pipeline: who worked, and who waited" if pipeline else "A step of all ranks",
        caption=f"From the middle of the trace, at {begin:.3f} s; {path.name} has the others, for Perfetto{left_out}."
        + worked,
        traces=traces,
        x="ms since the step began",
        y="",
        axes={
            "barmode": "overlay",
            "bargap": 0.35,
            "showlegend": True,
            **({"uniformtext": {"mode": "hide", "minsize": 8}} if pipeline else {}),
            "yaxis": {"type": "category", "categoryarray": [names[rank] for rank in reversed(ranks)]},
        },
    )

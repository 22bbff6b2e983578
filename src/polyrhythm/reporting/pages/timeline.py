"""The timeline of one step of all ranks, from the trace that a run has left (simulated, or with `--timings`)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from polyrhythm.reporting.pages.plots import Plot, color

if TYPE_CHECKING:
    from pathlib import Path

_MOST_BYTES, _MOST_RANKS = 50_000_000, 32
_WAITING, _WAIT_COLOR = "wait", "#b9bec8"
_MARGIN = 0.1
"""Of the step, what is shown before and after it."""


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
    ordered = sorted(shown, key=lambda what: (what == _WAITING, what))
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": what,
            "base": [round(1000 * (start - begin), 4) for _, start, _ in shown[what]],
            "x": [round(1000 * (stop - start), 4) for _, start, stop in shown[what]],
            "y": [names[rank] for rank, _, _ in shown[what]],
            "marker": {"color": _WAIT_COLOR if what == _WAITING else color(index, len(ordered))},
        }
        for index, what in enumerate(ordered)
    ]
    left_out = f"; the first {_MOST_RANKS} of {len(names)} ranks" if len(names) > _MOST_RANKS else ""
    return Plot(
        title="A step of all ranks",
        caption=f"From the middle of the trace, at {begin:.3f} s; {path.name} has the others, for Perfetto{left_out}.",
        traces=traces,
        x="ms since the step began",
        y="",
        axes={
            "barmode": "overlay",
            "bargap": 0.35,
            "showlegend": True,
            "yaxis": {"type": "category", "categoryarray": [names[rank] for rank in reversed(ranks)]},
        },
    )

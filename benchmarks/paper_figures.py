"""Figures of papers as SVG, and their numbers beside them; drawn by what draws reports."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyrhythm.reporting.pages.plots import Plot, color, write_plots


def curve(
    name: str,
    points: Sequence[tuple[float, float]],
    index: int = 0,
    *,
    dashed: bool = False,
    marks: bool = True,
) -> dict[str, Any]:
    """Gives a line through points, of the color of its index; dashed ones are what the paper or an ideal says."""
    line: dict[str, Any] = {"color": "#8b93a3" if dashed else color(index, 8), "width": 2}
    if dashed:
        line["dash"] = "dash"
    return {
        "type": "scatter",
        "mode": "lines+markers" if marks else "lines",
        "name": name,
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "line": line,
    }


def bars(names: Sequence[str], values: Sequence[float], series: str, index: int = 0) -> dict[str, Any]:
    """Gives a bar for every name."""
    return {
        "type": "bar",
        "name": series,
        "x": list(names),
        "y": list(values),
        "marker": {"color": color(index, 8)},
    }


def figure(title: str, traces: list[dict[str, Any]], x: str, y: str, **axes: Any) -> Plot:
    """Gives a figure."""
    return Plot(
        title=title, caption="", traces=traces, x=x, y=y, axes={"showlegend": len(traces) > 1, **axes}
    )


def write(folder: Path, name: str, drawn: Sequence[Plot], facts: dict[str, Any], text: str) -> None:
    """Writes figures as SVG, their numbers as JSON, and their tables as Markdown."""
    command = " ".join(["python", *sys.argv])
    told = {"command": command, **facts, "figures": {plot.title: plot.traces for plot in drawn}}
    (folder / f"{name}.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(f"`{command}`\n\n{text}\n", encoding="utf-8")
    write_plots(drawn, folder, ["svg"])

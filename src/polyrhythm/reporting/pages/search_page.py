"""The page of a search: verdict, best trials and curves, in one HTML file which opens offline."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from polyrhythm.reporting.pages.plots import Plot, color
from polyrhythm.reporting.pages.report_page import page
from polyrhythm.reporting.search import Search, Tried, shown

MOST_ROWS, MOST_CURVES = 20, 60
_FAINT, _STRONG = "#8b93a3", "#e0752d"


def render(search: Search, folder: Path, command: str) -> str:
    """Return the HTML of a search.

    Args:
        search: its trials.
        folder: where the page will stand; links to runs' reports are relative to it.
        command: that repeats it.
    """
    title = f"Search by {search.method}: {len(search.trials)} trials"
    drawn = plots(search)
    boxes = [
        f"<figure{' class=wide' if index == 0 else ''}><figcaption><h3>{escape(plot.title)}</h3>"
        f'<p>{escape(plot.caption)}</p></figcaption><div class="plot" id="plot-{index}"></div></figure>'
        for index, plot in enumerate(drawn)
    ]
    sections = [
        f"<header><h1>{escape(title)}</h1></header>",
        "<section><h2>Verdict</h2>"
        + "".join(f"<p>{escape(text)}</p>" for text in search.verdict())
        + "</section>",
        _table(search, folder),
        "<section><h2>Curves</h2><noscript><p>The curves need JavaScript; the table above does not.</p></noscript>"
        f'<div class="plots">{"".join(boxes)}</div></section>'
        if boxes
        else "",
        _failed(search),
        '<section><h2>How to repeat it</h2><div class="copyable"><pre><code>'
        f'{escape(command)}</code></pre><button type="button">Copy</button></div></section>',
        "<footer>Made by Polyrhythm from the trials of the search; this page needs no network.</footer>",
    ]
    return page(
        f"{title} – Polyrhythm", "\n".join(filter(None, sections)), [plot.to_json() for plot in drawn]
    )


def _table(search: Search, folder: Path) -> str:
    heads, rows = search.table(MOST_ROWS)
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    folders = {str(trial.number): trial.folder for trial in search.trials}
    lines = []
    for index, cells in enumerate(rows):
        address = os.path.relpath(folder / folders[cells[0]] / "report.html", folder)
        link = f'<td><a href="{escape(address, quote=True)}">{escape(cells[0])}</a></td>'
        others = "".join(f"<td>{escape(cell)}</td>" for cell in cells[1:])
        lines.append(f"<tr{' class=best' if index == 0 and search.best() else ''}>{link}{others}</tr>")
    more = len(search.trials) - len(rows)
    note = f'<p class="soft small">{more} more in search.json.</p>' if more > 0 else ""
    return (
        f'<section><h2>Best trials</h2><div class="scroll"><table class="classes unbroken"><tr>{head}</tr>'
        f"{''.join(lines)}</table></div>{note}</section>"
    )


def _failed(search: Search) -> str:
    items = "".join(
        f"<li>trial {trial.number}: {escape(trial.error)}</li>" for trial in search.trials if trial.error
    )
    return f"<section><h2>Failed</h2><ul>{items}</ul></section>" if items else ""


def plots(search: Search) -> list[Plot]:
    """Return every plot for which the trials have data."""
    found = [_progress(search), _importance(search), _parallel(search), _curves(search)]
    return [plot for plot in found if plot is not None]


def _axis(search: Search) -> dict[str, Any]:
    return {"tickformat": ".0%"} if search.goal in {"top1", "top5"} else {}


def _progress(search: Search) -> Plot | None:
    ended = [trial for trial in search.trials if trial.state != "running"]
    points = [(place, trial) for place, trial in enumerate(ended, 1) if trial.value is not None]
    best = search.best_so_far()
    if not points:
        return None
    shapes = {"done": "circle", "stopped": "x", "failed": "triangle-down"}
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": {"done": "trial", "stopped": "ended early", "failed": "failed"}[state],
            "x": [place for place, trial in points if trial.state == state],
            "y": [trial.value for _, trial in points if trial.state == state],
            "text": [f"trial {trial.number}" for _, trial in points if trial.state == state],
            "marker": {"size": 7, "symbol": symbol, "color": _FAINT if state != "done" else "#3b7dd8"},
        }
        for state, symbol in shapes.items()
        if any(trial.state == state for _, trial in points)
    ]
    line = {"color": _STRONG, "width": 2, "shape": "hv"}
    traces.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "best so far",
            "x": [place for place, _ in best],
            "y": [value for _, value in best],
            "line": line,
        }
    )
    return Plot(
        title="Progress",
        caption="Each trial in the order in which it began, and the best so far.",
        traces=traces,
        x="trials",
        y=search.goal,
        axes={"yaxis": _axis(search), "showlegend": True},
    )


def _importance(search: Search) -> Plot | None:
    if not search.importance:
        return None
    ordered = sorted(search.importance.items(), key=lambda each: each[1])
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": [share for _, share in ordered],
        "y": [name for name, _ in ordered],
        "marker": {"color": color(0, 1)},
    }
    return Plot(
        title="What matters",
        caption="The share of the differences between trials that each option explains (fANOVA).",
        traces=[bars],
        x="share",
        y="",
        axes={"xaxis": {"tickformat": ".0%", "rangemode": "tozero"}, "yaxis": {"automargin": True}},
    )


def _parallel(search: Search) -> Plot | None:
    """Return the plot of parallel coordinates: a line a trial, through its value on each option's own axis."""
    names = list(dict.fromkeys(name for trial in search.trials for name in trial.parameters))
    trials = [trial for trial in search.trials if trial.value is not None]
    if len(names) < 2 or len(trials) < 2:
        return None
    heights = {name: _heights([trial.parameters.get(name) for trial in trials]) for name in names}
    values = _heights([trial.value for trial in trials])
    ranked = sorted(range(len(trials)), key=lambda place: values[place] or 0.0, reverse=search.maximize)
    best = set(ranked[: max(1, len(ranked) // 10)])
    traces = []
    for place in reversed(ranked):
        trial = trials[place]
        said = [f"{name}: {trial.shown.get(name, '–')}" for name in names]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": [*names, search.goal],
                "y": [*(heights[name][place] for name in names), values[place]],
                "text": [*said, f"trial {trial.number}: {shown(search.goal, trial.value)}"],
                "hoverinfo": "text",
                "connectgaps": True,
                "line": {"color": _STRONG if place in best else _FAINT, "width": 2 if place in best else 1},
                "opacity": 1 if place in best else 0.45,
            }
        )
    return Plot(
        title="Parallel coordinates",
        caption="A line a trial, from its least to its greatest value on each axis; the best tenth is orange.",
        traces=traces,
        x="",
        y="least to greatest",
        axes={"yaxis": {"showticklabels": False}, "showlegend": False, "hovermode": "closest"},
    )


def _heights(values: Sequence[Any]) -> list[float | None]:
    """Return where each value is on an axis from 0 to 1: numbers by size or logarithm, others in order."""
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) == sum(value is not None for value in values) and numbers:
        low, high = min(numbers), max(numbers)
        if low > 0 and high / low > 100:
            values = [None if value is None else math.log(value) for value in values]
            low, high = math.log(low), math.log(high)
        return [
            None if value is None else (value - low) / (high - low) if high > low else 0.5 for value in values
        ]
    known = sorted({str(value) for value in values if value is not None})
    step = max(1, len(known) - 1)
    return [None if value is None else known.index(str(value)) / step for value in values]


def _curves(search: Search) -> Plot | None:
    trials = [trial for trial in search.trials if len(trial.curve) > 1]
    if not trials:
        return None
    best = search.best()
    shown_trials = trials[-MOST_CURVES:]
    if best is not None and len(best.curve) > 1:  # last, so that no other lies over it
        shown_trials = [*[trial for trial in shown_trials if trial is not best][1 - MOST_CURVES :], best]
    traces = [
        _curve(trial, index, len(shown_trials), trial is best) for index, trial in enumerate(shown_trials)
    ]
    note = f" It and the newest others are shown, {MOST_CURVES} in all." if len(trials) > MOST_CURVES else ""
    return Plot(
        title="Learning curves",
        caption=f"The {search.goal} of each trial's tests; the best trial is drawn strongly.{note}",
        traces=traces,
        x="epochs",
        y=search.goal,
        axes={"yaxis": _axis(search), "xaxis": _whole(trials), "showlegend": False},
    )


_FEW_EPOCHS = 10


def _whole(trials: Sequence[Tried]) -> dict[str, Any]:
    """Return an axis of epochs without marks between them."""
    return {"dtick": 1} if max(trial.curve[-1][0] for trial in trials) <= _FEW_EPOCHS else {}


def _curve(trial: Tried, index: int, of: int, strong: bool) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"trial {trial.number}",
        "x": [epochs for epochs, _ in trial.curve],
        "y": [value for _, value in trial.curve],
        "line": {"color": _STRONG if strong else color(index, of), "width": 3 if strong else 1},
        "opacity": 1 if strong else 0.5,
    }

"""The page of a comparison: verdict, table and curves of several runs, in one HTML file which opens offline."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from polyrhythm.reporting.comparison import (
    ComparedRun,
    Comparison,
    Row,
    price_to,
    throughput,
    time_to,
    waiting,
)
from polyrhythm.reporting.pages.plots import Plot, color
from polyrhythm.reporting.pages.report_page import page
from polyrhythm.reporting.quantities import counted
from polyrhythm.reporting.summary import Test

FIRST = "Accuracy over time"
LONGEST_LEGEND = 12


def render(comparison: Comparison, folder: Path, command: str) -> str:
    """Return the HTML of a comparison.

    Args:
        comparison: of the runs.
        folder: where the page will stand; links to runs' reports are relative to it.
        command: that repeats the comparison; nothing if there is none.
    """
    first = comparison.rows[0].runs[0]
    title = (
        f"{first.known['model']} on {first.known['data']}: {counted(len(comparison.rows), 'way')} compared"
    )
    drawn = plots(comparison)
    sections = [
        f"<header><h1>{escape(title)}</h1></header>",
        *(f'<div class="banner" role="note">{escape(text)}.</div>' for text in comparison.warnings),
        "<section><h2>Verdict</h2>"
        + "".join(f"<p>{escape(text)}</p>" for text in comparison.verdict())
        + "</section>",
        _table(comparison),
        _figures(drawn),
        _refused(comparison),
        _runs(comparison, folder),
        _repeat(command),
        "<footer>Made by Polyrhythm from the events of the runs; this page needs no network.</footer>",
    ]
    return page(
        f"{title} – Polyrhythm", "\n".join(filter(None, sections)), [plot.to_json() for plot in drawn]
    )


def _table(comparison: Comparison) -> str:
    heads, rows = comparison.table()
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    best = comparison.fastest() or comparison.most_accurate()
    lines = [
        f"<tr{' class=best' if comparison.rows[index] is best else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for index, cells in enumerate(rows)
    ]
    against = {
        comparison.baseline(row).name for row in comparison.rows if comparison.baseline(row) is not row
    }
    note = "± is the standard deviation over seeds."
    note += f" Speed-up is told against {'; '.join(sorted(against))}." if against else ""
    return (
        f'<section><h2>Figures</h2><div class="scroll"><table class="classes unbroken"><tr>{head}</tr>{"".join(lines)}'
        f'</table></div><p class="soft small">{escape(note)}</p></section>'
    )


def _figures(drawn: Sequence[Plot]) -> str:
    boxes = [
        f"<figure{' class=wide' if index == 0 else ''}><figcaption><h3>{escape(plot.title)}</h3>"
        f'<p>{escape(plot.caption)}</p></figcaption><div class="plot" id="plot-{index}"></div></figure>'
        for index, plot in enumerate(drawn)
    ]
    hint = "<noscript><p>The curves need JavaScript; the table above does not.</p></noscript>"
    return (
        f'<section><h2>Curves</h2>{hint}<div class="plots">{"".join(boxes)}</div></section>' if drawn else ""
    )


def _refused(comparison: Comparison) -> str:
    items = "".join(f"<li>{escape(what)}: {escape(why)}</li>" for what, why in comparison.refused.items())
    return f"<section><h2>Left out</h2><ul>{items}</ul></section>" if items else ""


def _runs(comparison: Comparison, folder: Path) -> str:
    items = []
    for row in comparison.rows:
        links = []
        for run in row.runs:
            address = os.path.relpath(run.folder / "report.html", folder)
            shown = f"seed {run.seed}" + ("" if run.outcome == "done" else f" ({run.outcome})")
            links.append(f'<a href="{escape(address, quote=True)}">{escape(shown)}</a>')
        items.append(f"<li>{escape(row.name)}: {', '.join(links)}</li>")
    return f"<section><h2>Reports of the runs</h2><ul>{''.join(items)}</ul></section>"


def _repeat(command: str) -> str:
    if not command:
        return ""
    return (
        '<section><h2>How to repeat it</h2><div class="copyable"><pre><code>'
        f'{escape(command)}</code></pre><button type="button">Copy</button></div></section>'
    )


def plots(comparison: Comparison) -> list[Plot]:
    """Return every plot for which the runs have data."""
    clock = (
        "virtual seconds" if all(run.simulated for row in comparison.rows for run in row.runs) else "seconds"
    )
    found = [
        _tests(comparison, FIRST, clock, lambda run, test: test.event.time_s),
        _tests(
            comparison,
            "Accuracy over images",
            "training images of all workers",
            lambda run, test: test.images,
        ),
        _tests(comparison, "Accuracy over money", "price", _price),
        _losses(comparison, clock),
        _scaling(comparison),
        _bars(comparison),
        _pareto(comparison),
        _shares(comparison),
    ]
    return [plot for plot in found if plot is not None]


def _price(run: ComparedRun, test: Test) -> float:
    return math.nan if run.price_per_s is None else run.price_per_s * test.event.time_s


def _curves(
    comparison: Comparison, of: Callable[[ComparedRun], tuple[list[float], list[float]]]
) -> list[dict[str, Any]]:
    traces = []
    for index, row in enumerate(comparison.rows):
        for number, run in enumerate(row.runs):
            x, y = of(run)
            if not any(math.isfinite(value) for value in x):
                continue
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers" if len(x) < 30 else "lines",
                    "name": row.name,
                    "legendgroup": row.name,
                    "showlegend": number == 0,
                    "x": x,
                    "y": y,
                    "opacity": 1 if number == 0 else 0.45,
                    "line": {"color": color(index, len(comparison.rows)), "width": 2 if number == 0 else 1},
                    "marker": {"size": 5},
                }
            )
    return traces


def _legend(comparison: Comparison, *, first: bool) -> dict[str, Any]:
    """Return the settings of the legend, which the first plot has for all that show the same rows."""
    below = {"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top"}
    return {"showlegend": first and len(comparison.rows) <= LONGEST_LEGEND, "legend": below}


def _tests(
    comparison: Comparison, title: str, x: str, of: Callable[[ComparedRun, Test], float]
) -> Plot | None:
    traces = _curves(
        comparison,
        lambda run: ([of(run, test) for test in run.tests], [test.event.test_top1 for test in run.tests]),
    )
    if not traces:
        return None
    shapes = []
    target = comparison.target
    if target is not None and target.metric == "top1":
        line = {"color": "#8b93a3", "width": 1, "dash": "dot"}
        shapes = [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": target.value,
                "y1": target.value,
                "line": line,
            }
        ]
    return Plot(
        title=title,
        caption="Test top-1; the first seed of each is drawn strongly, the others thinly"
        + (f", the target {target} dotted." if shapes else "."),
        traces=traces,
        x=x,
        y="test accuracy",
        axes={
            "yaxis": {"tickformat": ".0%"},
            "xaxis": {"rangemode": "tozero"},
            "shapes": shapes,
            **_legend(comparison, first=title == FIRST),
        },
    )


def _losses(comparison: Comparison, clock: str) -> Plot | None:
    traces = _curves(
        comparison,
        lambda run: ([time_s for time_s, _, _ in run.losses], [loss for _, _, loss in run.losses]),
    )
    if not traces:
        return None
    return Plot(
        title="Training loss over time",
        caption="Mean over all workers' reports; colours as in the first plot.",
        traces=traces,
        x=clock,
        y="training loss",
        axes={
            "yaxis": {"rangemode": "tozero"},
            "xaxis": {"rangemode": "tozero"},
            **_legend(comparison, first=False),
        },
    )


def _scaling(comparison: Comparison) -> Plot | None:
    strategies: dict[str, list[Row]] = {}
    for row in comparison.rows:
        if row.values(throughput):
            strategies.setdefault(", ".join([row.strategy, *row.options.values()]), []).append(row)
    if not any(len({row.workers for row in rows}) > 1 for rows in strategies.values()):
        return None
    traces: list[dict[str, Any]] = []
    for index, (name, rows) in enumerate(strategies.items()):
        ordered = sorted(rows, key=lambda row: row.workers)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": [row.workers for row in ordered],
                "y": [row.mean(throughput) for row in ordered],
                "error_y": _errors([row.deviation(throughput) for row in ordered]),
                "line": {"color": color(index, len(strategies)), "width": 2},
            }
        )
    base = comparison.baseline(
        min((row for rows in strategies.values() for row in rows), key=lambda row: row.workers)
    )
    most = max(row.workers for rows in strategies.values() for row in rows)
    each = base.mean(throughput) / base.workers
    traces.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "ideal",
            "x": [base.workers, most],
            "y": [each * base.workers, each * most],
            "line": {"color": "#8b93a3", "width": 1, "dash": "dash"},
        }
    )
    return Plot(
        title="Throughput against workers",
        caption=f"Images a second of all workers; the dashed line is {base.name}, times as many.",
        traces=traces,
        x="workers",
        y="images/s",
        axes={
            "yaxis": {"rangemode": "tozero"},
            "xaxis": {"rangemode": "tozero"},
            "showlegend": True,
            "legend": {"orientation": "h", "x": 0, "y": -0.35, "yanchor": "top"},
        },
    )


def _errors(deviations: Sequence[float]) -> dict[str, Any]:
    return {
        "type": "data",
        "array": [value if math.isfinite(value) else 0 for value in deviations],
        "visible": True,
    }


def _bars(comparison: Comparison) -> Plot | None:
    target = comparison.target
    if target is None:
        return None
    reach = time_to(target)
    rows = comparison.through()
    if not rows:
        return None
    rows.sort(key=lambda row: row.mean(reach), reverse=True)
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": [row.mean(reach) for row in rows],
        "y": [row.name for row in rows],
        "error_x": _errors([row.deviation(reach) for row in rows]),
        "marker": {"color": [color(comparison.rows.index(row), len(comparison.rows)) for row in rows]},
    }
    return Plot(
        title=f"Time to {target}",
        caption="Of the first test that reaches it, mean over seeds; rows of which a seed never does are left out.",
        traces=[bars],
        x="seconds",
        y="",
    )


def _pareto(comparison: Comparison) -> Plot | None:
    """Return price against time to the target, with a line along the rows than which none is faster and cheaper."""
    target = comparison.target
    if target is None:
        return None
    reach, cost = time_to(target), price_to(target)
    rows = [row for row in comparison.through() if row.values(cost)]
    if len(rows) < 2:
        return None
    rows.sort(key=lambda row: (row.mean(reach), row.mean(cost)))
    best: list[Row] = []
    for row in rows:
        if not best or row.mean(cost) < best[-1].mean(cost):
            best.append(row)
    points = {
        "type": "scatter",
        "mode": "markers",
        "name": "ways",
        "x": [row.mean(reach) for row in rows],
        "y": [row.mean(cost) for row in rows],
        "text": [row.name for row in rows],
        "marker": {
            "size": 9,
            "color": [color(comparison.rows.index(row), len(comparison.rows)) for row in rows],
        },
    }
    line = {
        "type": "scatter",
        "mode": "lines",
        "name": "none is faster and cheaper",
        "x": [row.mean(reach) for row in best],
        "y": [row.mean(cost) for row in best],
        "line": {"color": "#8b93a3", "width": 1, "dash": "dash", "shape": "hv"},
    }
    return Plot(
        title=f"Price against time to {target}",
        caption="Means over seeds; along the dashed line are those than which none is faster and cheaper: "
        + "; ".join(row.name for row in best)
        + ".",
        traces=[points, line],
        x="seconds",
        y="price",
        axes={"xaxis": {"rangemode": "tozero"}, "yaxis": {"rangemode": "tozero"}, "showlegend": False},
    )


def _shares(comparison: Comparison) -> Plot | None:
    rows = sorted((row for row in comparison.rows if row.values(waiting)), key=lambda row: row.mean(waiting))
    if not any(row.mean(waiting) > 0 for row in rows):
        return None
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": "share of time waiting",
            "x": [row.mean(waiting) for row in rows],
            "y": [row.name for row in rows],
            "marker": {"color": [color(comparison.rows.index(row), len(comparison.rows)) for row in rows]},
        }
    ]
    return Plot(
        title="Waiting",
        caption="The share of workers' time that was spent waiting for others or the network.",
        traces=bars,
        x="share of time",
        y="",
        axes={"xaxis": {"tickformat": ".0%", "rangemode": "tozero"}},
    )

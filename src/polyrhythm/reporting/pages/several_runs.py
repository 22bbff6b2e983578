"""Pages that set several runs or networks side by side: a comparison, a search, an ensemble, and robustness.

Each is one HTML file, which opens offline and links to the reports of its runs.
"""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from polyrhythm.errors import RequestError
from polyrhythm.escaping import html as escape
from polyrhythm.reporting.comparison import (
    RANK,
    SECONDARY,
    ComparedRun,
    Comparison,
    Row,
    price_to,
    throughput,
    time_to,
    waiting,
)
from polyrhythm.reporting.pages.plots import Plot, accuracy_axis, color
from polyrhythm.reporting.pages.report_page import command_to_copy, curves, page, section, table
from polyrhythm.reporting.quantities import counted, duration, percent
from polyrhythm.reporting.search import Search, Tried, shown
from polyrhythm.reporting.summary import Test

FIRST = "Accuracy over time"
_NAME = 30
"""Characters of a line of a name on an axis."""
LONGEST_LEGEND = 12
MOST_ROWS, MOST_CURVES = 20, 60
_FAINT, _STRONG = "#8b93a3", "#e0752d"


def _title(text: str) -> str:
    return f"<header><h1>{escape(text)}</h1></header>"


def _verdict(sentences: Iterable[str]) -> str:
    return section("Result", "".join(f"<p>{escape(text)}</p>" for text in sentences))


def _list(heading: str, items: Iterable[str]) -> str:
    entries = "".join(f"<li>{item}</li>" for item in items)
    return section(heading, f"<ul>{entries}</ul>" if entries else "")


def _link(run: Path, folder: Path, text: str) -> str:
    """Return a link to the report of a run, from a page in a folder."""
    address = os.path.relpath(run / "report.html", folder)
    return f'<a href="{escape(address)}">{escape(text)}</a>'


def _lines(x: Sequence[Any], y: Sequence[Any], mode: str = "lines", **more: Any) -> dict[str, Any]:
    """Return a trace of lines, of markers, or of both."""
    return {"type": "scatter", "mode": mode, "x": x, "y": y, **more}


def _bars(
    names: Sequence[str], values: Sequence[float], colors: str | Sequence[str], **more: Any
) -> dict[str, Any]:
    """Return a trace of horizontal bars."""
    marker = {"color": colors}
    return {"type": "bar", "orientation": "h", "x": values, "y": names, "marker": marker, **more}


# A comparison


def render_comparison(comparison: Comparison, folder: Path, command: str) -> str:
    """Return the HTML of a comparison: verdict, table and curves.

    Args:
        comparison: comparison of the runs.
        folder: folder of the page; links to runs' reports are relative to it.
        command: command that repeats the comparison; empty if there is none.
    """
    first = comparison.rows[0].runs[0]
    ways = counted(len(comparison.rows), "way")
    title = f"{first.known['model']} on {first.known['data']}: {ways} compared"
    drawn = comparison_plots(comparison)
    sections = [
        _title(title),
        _verdict(comparison.verdict()),
        *(f'<div class="banner" role="note">{escape(text)}.</div>' for text in comparison.warnings),
        _figures(comparison),
        curves(drawn, "the table above does"),
        _list("Left out", [f"{escape(what)}: {escape(why)}" for what, why in comparison.refused.items()]),
        _list("Reports of the runs", [_reports(row, folder) for row in comparison.rows]),
        section("How to repeat it", command_to_copy(command)),
    ]
    return page(title, sections, drawn, source="the events of the runs")


@dataclass(frozen=True, kw_only=True)
class PlanTable:
    """A plan as the terminal and its report show it.

    Attributes:
        heading: heading of the plan.
        reason: why the recommended choice is recommended.
        command: command of the recommended choice.
        heads: headings of the ranking's columns.
        rows: the ranking; the recommended choice is first.
        notes: sentences below it.
        left_out: candidates that are no choice, with the reason.
    """

    heading: str
    reason: str
    command: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    left_out: Sequence[tuple[str, str]]


def render_plan(plan: PlanTable, comparison: Comparison | None, folder: Path, command: str) -> str:
    """Return the HTML of a plan: recommendation, ranking, excluded candidates, and the trials.

    Args:
        plan: the plan.
        comparison: comparison of its trials; None: there were none.
        folder: folder of the page; links to runs' reports are relative to it.
        command: command that repeats the plan.
    """
    notes = "".join(f'<p class="soft small">{escape(text)}</p>' for text in plan.notes)
    left_out = [f"{escape(what)}: {escape(why)}" for what, why in plan.left_out]
    ranking = table(plan.heads, [list(map(escape, cells)) for cells in plan.rows], best={0})
    answer = [
        section("Recommended", f'<p class="answer">{escape(plan.reason)}</p>{command_to_copy(plan.command)}'),
        section("Ranking", ranking + notes),
        _list("Left out", left_out),
    ]
    again = section("How to repeat it", command_to_copy(command))
    if comparison is None:
        return page(plan.heading, [_title(plan.heading), *answer, again], source="dry runs")
    first = comparison.rows[0].runs[0]
    drawn = comparison_plots(comparison)
    sections = [
        _title(f"{first.known['model']} on {first.known['data']}, {plan.heading}"),
        *answer,
        curves(drawn, "the tables above do"),
        section("Trials", _trials_of_plan(comparison)),
        _list("Reports of the trials", [_reports(row, folder) for row in comparison.rows]),
        again,
    ]
    return page(plan.heading, sections, drawn, source="simulated trials")


def _figures(comparison: Comparison) -> str:
    heads, rows = comparison.table()
    against = {
        comparison.baseline(row).name for row in comparison.rows if comparison.baseline(row) is not row
    }
    note = "± is the standard deviation over seeds."
    note += f" The baseline of speed-up is {'; '.join(sorted(against))}." if against else ""
    if len(rows) > 1:
        note += " Rows of one rank do not differ by more than their seeds."
    best = {index for index, (rank, _) in enumerate(comparison.ranking()) if rank == 1 and len(rows) > 1}
    shown = _without(SECONDARY, heads, rows, best)
    whole = f"<details><summary>All figures</summary>{_without((), heads, rows, best)}</details>"
    return section("Figures", f'{shown}<p class="soft small">{escape(note)}</p>{whole}')


def _trials_of_plan(comparison: Comparison) -> str:
    """Return the figures of a plan's trials, without ranks: those of the plan count the seeds of all candidates."""
    heads, rows = comparison.table()
    return f"<details><summary>Figures of all trials</summary>{_without((RANK,), heads, rows)}</details>"


def _without(
    left_out: Container[str], heads: Sequence[str], rows: Sequence[Sequence[str]], best: Container[int] = ()
) -> str:
    kept = [place for place, head in enumerate(heads) if head not in left_out]
    return table(
        [heads[place] for place in kept], [[escape(row[place]) for place in kept] for row in rows], best
    )


def _reports(row: Row, folder: Path) -> str:
    links = [
        _link(run.folder, folder, f"seed {run.seed}" + ("" if run.outcome == "done" else f" ({run.outcome})"))
        for run in row.runs
    ]
    return f"{escape(row.name)}: {', '.join(links)}"


def comparison_plots(comparison: Comparison) -> list[Plot]:
    """Return every plot for which the runs have data."""
    clock = _clock(comparison)
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
        _times(comparison),
        _pareto(comparison),
        _shares(comparison),
    ]
    return [plot for plot in found if plot is not None]


def _clock(comparison: Comparison) -> str:
    return "virtual seconds" if comparison.virtual else "seconds"


def _names(comparison: Comparison, rows: Sequence[Row]) -> list[str]:
    """Return short names of rows for an axis: without what all rows share, in lines of a few words."""
    workers = len({row.workers for row in comparison.rows}) > 1
    found = []
    for row in rows:
        parts = [row.strategy, *([counted(row.workers, "worker")] if workers else [])]
        parts += [f"{key}={value}" for key, value in row.options.items()]
        found.append("<br>".join(line for part in parts for line in wrap(part, _NAME)))
    return found


def _price(run: ComparedRun, test: Test) -> float:
    return math.nan if run.price_per_s is None else run.price_per_s * test.event.time_s


def _tested_curves(
    comparison: Comparison, of: Callable[[ComparedRun], tuple[list[float], list[float]]]
) -> list[dict[str, Any]]:
    traces = []
    for index, row in enumerate(comparison.rows):
        for number, run in enumerate(row.runs):
            x, y = of(run)
            if not any(math.isfinite(value) for value in x):
                continue
            traces.append(
                _lines(
                    x,
                    y,
                    "lines+markers" if len(x) < 30 else "lines",
                    name=row.name,
                    legendgroup=row.name,
                    showlegend=number == 0,
                    opacity=1 if number == 0 else 0.45,
                    line={"color": color(index, len(comparison.rows)), "width": 2 if number == 0 else 1},
                    marker={"size": 5},
                )
            )
    return traces


def _legend(comparison: Comparison, *, first: bool) -> dict[str, Any]:
    """Return the settings of the legend, which the first plot has for all that show the same rows."""
    below = {"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top"}
    return {"showlegend": first and len(comparison.rows) <= LONGEST_LEGEND, "legend": below}


def _tests(
    comparison: Comparison, title: str, x: str, of: Callable[[ComparedRun, Test], float]
) -> Plot | None:
    traces = _tested_curves(
        comparison,
        lambda run: ([of(run, test) for test in run.tests], [test.event.test_top1 for test in run.tests]),
    )
    if not traces:
        return None
    shapes = []
    target = comparison.target
    if target is not None and target.metric == "top1":
        line = {"color": _FAINT, "width": 1, "dash": "dot"}
        across = {"x0": 0, "x1": 1, "y0": target.value, "y1": target.value}
        shapes = [{"type": "line", "xref": "paper", **across, "line": line}]
    return Plot(
        title=title,
        caption="Test top-1; the first seed of each is drawn strongly, the others thinly"
        + (f", the target {target} dotted." if shapes else "."),
        traces=traces,
        x=x,
        y="test accuracy",
        axes={
            "yaxis": accuracy_axis(
                ([test.event.test_top1 for test in run.tests] for row in comparison.rows for run in row.runs),
                target.value if shapes and target is not None else None,
            ),
            "xaxis": {"rangemode": "tozero"},
            "shapes": shapes,
            **_legend(comparison, first=title == FIRST),
        },
    )


def _losses(comparison: Comparison, clock: str) -> Plot | None:
    traces = _tested_curves(
        comparison,
        lambda run: ([time_s for time_s, _, _ in run.losses], [loss for _, _, loss in run.losses]),
    )
    if not traces:
        return None
    return Plot(
        title="Training loss over time",
        caption="Mean over all workers' reports; colors as in the first plot.",
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
            _lines(
                [row.workers for row in ordered],
                [row.mean(throughput) for row in ordered],
                "lines+markers",
                name=name,
                error_y=_errors([row.deviation(throughput) for row in ordered]),
                line={"color": color(index, len(strategies)), "width": 2},
            )
        )
    base = comparison.baseline(
        min((row for rows in strategies.values() for row in rows), key=lambda row: row.workers)
    )
    most = max(row.workers for rows in strategies.values() for row in rows)
    each = base.mean(throughput) / base.workers
    ideal = {"color": _FAINT, "width": 1, "dash": "dash"}
    traces.append(_lines([base.workers, most], [each * base.workers, each * most], name="ideal", line=ideal))
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


def _colors(comparison: Comparison, rows: Sequence[Row]) -> list[str]:
    return [color(comparison.rows.index(row), len(comparison.rows)) for row in rows]


def _times(comparison: Comparison) -> Plot | None:
    target = comparison.target
    if target is None:
        return None
    reach = time_to(target)
    rows = comparison.through()
    if not rows:
        return None
    rows.reverse()
    times, errors = [row.mean(reach) for row in rows], _errors([row.deviation(reach) for row in rows])
    return Plot(
        title=f"Time to {target}",
        caption="Time of the first test that reaches it, mean over seeds; rows are omitted if a seed never does.",
        traces=[_bars(_names(comparison, rows), times, _colors(comparison, rows), error_x=errors)],
        x=_clock(comparison),
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
    points = _lines(
        [row.mean(reach) for row in rows],
        [row.mean(cost) for row in rows],
        "markers",
        name="ways",
        text=[row.name for row in rows],
        marker={"size": 9, "color": _colors(comparison, rows)},
    )
    line = _lines(
        [row.mean(reach) for row in best],
        [row.mean(cost) for row in best],
        name="none is faster and cheaper",
        line={"color": _FAINT, "width": 1, "dash": "dash", "shape": "hv"},
    )
    return Plot(
        title=f"Price against time to {target}",
        caption="Means over seeds; along the dashed line are those than which none is faster and cheaper: "
        + "; ".join(row.name for row in best)
        + ".",
        traces=[points, line],
        x=_clock(comparison),
        y="price",
        axes={"xaxis": {"rangemode": "tozero"}, "yaxis": {"rangemode": "tozero"}, "showlegend": False},
    )


def _shares(comparison: Comparison) -> Plot | None:
    rows = sorted((row for row in comparison.rows if row.values(waiting)), key=lambda row: row.mean(waiting))
    if not any(row.mean(waiting) > 0 for row in rows):
        return None
    names, shares = _names(comparison, rows), [row.mean(waiting) for row in rows]
    return Plot(
        title="Waiting",
        caption="The share of workers' time that was spent waiting for others or the network.",
        traces=[_bars(names, shares, _colors(comparison, rows), name="share of time waiting")],
        x="share of time",
        y="",
        axes={"xaxis": {"tickformat": ".0%", "rangemode": "tozero"}},
    )


# A search


def render_search(search: Search, folder: Path, command: str) -> str:
    """Return the HTML of a search: verdict, best trials and curves.

    Args:
        search: search with its trials.
        folder: folder of the page; links to runs' reports are relative to it.
        command: command that repeats the search.
    """
    title = f"Search by {search.method}: {len(search.trials)} trials"
    drawn = search_plots(search)
    failed = [f"trial {trial.number}: {escape(trial.error)}" for trial in search.trials if trial.error]
    sections = [
        _title(title),
        _verdict(search.verdict()),
        _trials(search, folder),
        curves(drawn, "the table above does"),
        _list("Failed", failed),
        section("How to repeat it", command_to_copy(command)),
    ]
    return page(title, sections, drawn, source="the trials of the search")


def _trials(search: Search, folder: Path) -> str:
    heads, rows = search.table(MOST_ROWS)
    folders = {str(trial.number): trial.folder for trial in search.trials}
    lines = [[_link(folder / folders[cells[0]], folder, cells[0]), *map(escape, cells[1:])] for cells in rows]
    more = len(search.trials) - len(rows)
    note = f'<p class="soft small">{more} more in search.json.</p>' if more > 0 else ""
    return section("Best trials", table(heads, lines, {0} if search.best() else ()) + note)


def search_plots(search: Search) -> list[Plot]:
    """Return every plot for which the trials have data."""
    found = [_progress(search), _importance(search), _parallel(search), _learning_curves(search)]
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
    traces = [
        _lines(
            [place for place, trial in points if trial.state == state],
            [trial.value for _, trial in points if trial.state == state],
            "markers",
            name={"done": "trial", "stopped": "ended early", "failed": "failed"}[state],
            text=[f"trial {trial.number}" for _, trial in points if trial.state == state],
            marker={"size": 7, "symbol": symbol, "color": _FAINT if state != "done" else "#3b7dd8"},
        )
        for state, symbol in shapes.items()
        if any(trial.state == state for _, trial in points)
    ]
    places, values = [place for place, _ in best], [value for _, value in best]
    line = {"color": _STRONG, "width": 2, "shape": "hv"}
    traces.append(_lines(places, values, name="best so far", line=line))
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
    names, shares = [name for name, _ in ordered], [share for _, share in ordered]
    return Plot(
        title="What matters",
        caption="The share of the differences between trials that each option explains (fANOVA).",
        traces=[_bars(names, shares, color(0, 1))],
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
        labels = [f"{name}: {trial.shown.get(name, '–')}" for name in names]
        traces.append(
            _lines(
                [*names, search.goal],
                [*(heights[name][place] for name in names), values[place]],
                text=[*labels, f"trial {trial.number}: {shown(search.goal, trial.value)}"],
                hoverinfo="text",
                connectgaps=True,
                line={"color": _STRONG if place in best else _FAINT, "width": 2 if place in best else 1},
                opacity=1 if place in best else 0.45,
            )
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


def _learning_curves(search: Search) -> Plot | None:
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
    return _lines(
        [epochs for epochs, _ in trial.curve],
        [value for _, value in trial.curve],
        name=f"trial {trial.number}",
        line={"color": _STRONG if strong else color(index, of), "width": 3 if strong else 1},
        opacity=1 if strong else 0.5,
    )


# An ensemble


def render_ensemble(figures: Mapping[str, Any], *, student: bool) -> str:
    """Return the HTML of an ensemble's report: its members alone and together, and the network that learned from them.

    Args:
        figures: results of the ensemble, as `train --json` prints them.
        student: whether they are those of a network that learned from the members.
    """
    members, folder = figures["members"], Path(figures["run"])
    title = f"Ensemble of {counted(len(members), 'network')}"
    rows = []
    for each in members:
        run = Path(each["run"])
        rows.append([_link(run, folder, os.path.relpath(run, folder)), *_tested_cells(each)])
    if figures["ensemble"]:
        rows.append(["together", *_tested_cells(figures["ensemble"])])
    if student:
        rows.append([_link(folder / "student", folder, "student"), *_tested_cells(figures)])
    note = "Together: the mean of the members' probabilities."
    note += " The student learned from these, and is one network." if student else ""
    of = f"{figures['strategy']} on {figures['data']}, {counted(int(figures['workers']), 'worker')}"
    heads = ("run", "top-1", "top-5", "loss", "time")
    best = {len(members)} if figures["ensemble"] else ()
    sections = [
        f"<header><h1>{escape(title)}</h1><p class=soft>{escape(of)}</p></header>",
        section("Networks", table(heads, rows, best) + f"<p class=soft>{note}</p>"),
    ]
    return page(title, sections)


def _tested_cells(tested: Mapping[str, Any]) -> list[str]:
    cells = [
        "–" if (share := tested.get(key)) is None else percent(share) for key in ("test_top1", "test_top5")
    ]
    cells.append("–" if (loss := tested.get("test_loss")) is None else f"{loss:.4f}")
    cells.append("" if (seconds := tested.get("seconds")) is None else duration(seconds))
    return [escape(cell) for cell in cells]


# Robustness: accuracy of networks on distorted images


def write_robustness(
    path: Path, data: str, models: Sequence[Mapping[str, Any]], images: Mapping[str, bytes]
) -> None:
    """Write the page.

    Args:
        path: path of the file.
        data: name of the data set.
        models: results of `polyrhythm.robustness`.
        images: per kind of change, a JPEG file with an unchanged image and every strength.

    Raises:
        RequestError: it cannot be written.
    """
    plots = robustness_plots(models)
    strips = [_strip(decline["name"], images) for decline in models[0]["declines"]]
    sections = [
        _title(f"Robustness on {data}"),
        curves(plots, "the table below does", below=strips, wide=()),
        section("Figures", "".join(map(_of_kinds, models))),
    ]
    try:
        path.write_text(page("Robustness", sections, plots), "utf-8")
    except OSError as error:
        raise RequestError(f"cannot write {path} ({error.strerror}): name another with --plot") from None


def robustness_plots(models: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Return a plot for every kind of change, with one line per model; step 0 is the unchanged image."""
    return [
        Plot(
            title=decline["name"].replace("_", " "),
            caption=f"Test top-1 under this {decline['kind']}, ever stronger.",
            traces=[
                _lines(
                    [0, *decline["strengths"]],
                    [model["clean_top1"], *model["declines"][number]["top1"]],
                    "lines+markers",
                    name=Path(model["weights"]).parent.name or model["weights"],
                    line={"color": color(which, len(models))},
                )
                for which, model in enumerate(models)
            ],
            x="strength" if decline["kind"] == "augmentation" else "severity",
            y="test top-1",
            axes={"yaxis": {"range": [0, 1]}},
        )
        for number, decline in enumerate(models[0]["declines"])
    ]


def _strip(name: str, images: Mapping[str, bytes]) -> str:
    address = base64.b64encode(images[name]).decode("ascii")
    what = f"a test image, unchanged and under {name.replace('_', ' ')}, ever stronger"
    return f'<img style="width:100%" alt="{escape(what)}" src="data:image/jpeg;base64,{address}">'


def _summary(model: Mapping[str, Any]) -> str:
    mean = model.get("corrupted_top1")
    return "" if mean is None else f", {100 * mean:.1f} % on average over corruptions"


def _of_kinds(model: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(each["name"])}</th>'
        + "".join(
            f"<td>{100 * top1:.1f} % at {strength:g}</td>"
            for strength, top1 in zip(each["strengths"], each["top1"], strict=True)
        )
        + "</tr>"
        for each in model["declines"]
    )
    heading = (
        f"<h3>{escape(model['weights'])}: {100 * model['clean_top1']:.1f} % on unchanged images"
        f"{_summary(model)}</h3>"
    )
    return f'{heading}<div class="scroll"><table>{rows}</table></div>'

"""The plots of a report, as descriptions that plotly draws in the browser or exports to image files.

Colors of text and grid are those of the page, which may be light or dark.

    report.html ─ plot 0, plot 1, … ─▶ plots/training-loss.png, plots/test-accuracy-over-epochs.png, …

For files Kaleido opens the plots in a Chrome or Chromium of this machine; both packages are the extra `plots`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polyrhythm.errors import RequestError, unknown
from polyrhythm.reporting.figures import grouped
from polyrhythm.reporting.tables import is_virtual
from polyrhythm.run_files import read_json_in_run

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from polyrhythm.reporting.figures import RunFigures, Series, Stretch

# Readable on white and on near-black.
_PALETTE = ("#3b7dd8", "#e0752d", "#35a06a", "#c2477f", "#8a6fd1", "#b8901f", "#2a9aa8", "#d1504a")
_EMPHASIS = "#8b93a3"
_LARGEST_LEGEND = 9
_SMALL_SHARE = 0.05
_MOST_LINES = 64


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One plot: plotly's traces, the axes' titles with units, and further settings of the layout."""

    title: str
    caption: str
    traces: list[dict[str, Any]]
    x: str
    y: str
    axes: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the plot for plotly: `data` and `layout`."""
        layout = {
            "xaxis": {
                "title": {"text": self.x, "font": {"size": 12}},
                "zeroline": False,
                **self.axes.get("xaxis", {}),
            },
            "yaxis": {
                "title": {"text": self.y, "font": {"size": 12}, "standoff": 6},
                "zeroline": False,
                **self.axes.get("yaxis", {}),
            },
            "showlegend": 1 < len(self.traces) <= _LARGEST_LEGEND,
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
            **{key: value for key, value in self.axes.items() if key not in {"xaxis", "yaxis"}},
        }
        return {"data": self.traces, "layout": layout}


_SKIPPED = 10
"""One in this many points of an accuracy curve, the first ones, may lie outside its plot."""


def accuracy_axis(curves: Iterable[Sequence[float]], target: float | None = None) -> dict[str, Any]:
    """Return an axis of accuracies on which the end of the curves is not flattened by their beginning.

    Args:
        curves: accuracies in the order of the tests.
        target: a line that the plot has to show, too.
    """
    shown = [value for curve in curves for value in list(curve)[len(curve) // _SKIPPED :]]
    shown += [] if target is None else [target]
    low, high = min(shown), max(shown)
    margin = max(0.05 * (high - low), 0.005)
    return {
        "tickformat": ".0%" if high - low > _SMALL_SHARE else ".1%",
        "range": [max(0.0, low - margin), high + margin],
    }


def seconds_of(known: Mapping[str, Any]) -> str:
    """Return the title of an axis of a run's seconds."""
    return "virtual seconds" if is_virtual(known) else "seconds"


def plots(figures: RunFigures) -> list[Plot]:
    """Make every plot for which the run has data."""
    makers = (
        _loss,
        _accuracy_over_epochs,
        _accuracy_over_time,
        _images_per_s,
        _staleness,
        _waiting,
        _learning_rate,
    )
    return [plot for plot in (make(figures) for make in makers) if plot is not None]


def color(index: int, of: int) -> str:
    """Return the color of line `index` out of `of`."""
    if of <= len(_PALETTE):
        return _PALETTE[index]
    return f"hsl({360 * index // of}, 55%, 55%)"


def _finite(numbers: Iterable[float]) -> list[float | None]:
    # Plotly leaves a gap where there is no number; JSON has no other word for it.
    return [number if math.isfinite(number) else None for number in numbers]


def _line(name: str, x: Iterable[float], y: Iterable[float], color: str) -> dict[str, Any]:
    xs, ys = _finite(x), _finite(y)
    mode = "lines" if len(xs) > 12 else "lines+markers"
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "x": xs,
        "y": ys,
        "line": {"color": color, "width": 2},
        "marker": {"size": 6},
    }


def _worker_lines(
    figures: RunFigures, x: Callable[[Stretch], float], y: Callable[[Stretch], float]
) -> list[dict[str, Any]]:
    shown = sorted(figures.workers.items())[:_MOST_LINES]
    return [
        _line(
            f"worker {worker}", map(x, series.stretches), map(y, series.stretches), color(index, len(shown))
        )
        for index, (worker, series) in enumerate(shown)
    ]


def _of_all(figures: RunFigures) -> str:
    """Return a remark where there are more workers than a plot shows, else nothing."""
    count = len(figures.workers)
    return f" The first {_MOST_LINES} of {count:,} workers." if count > _MOST_LINES else ""


def _loss(figures: RunFigures) -> Plot | None:
    together = figures.together
    if together is None or all(math.isnan(each.loss) or not each.images for each in together.stretches):
        return None  # a dry run has no loss
    lines = _worker_lines(figures, lambda stretch: stretch.images_seen, lambda stretch: stretch.loss)
    if len(lines) > 1:
        for line in lines:
            line["line"]["width"] = 1.5
            line["opacity"] = 0.75
        mean = _rounds(together, len(figures.workers))
        images, losses = [stretch.images_seen for stretch in mean], [stretch.loss for stretch in mean]
        lines.append(_line("all workers", images, losses, _EMPHASIS))
        lines[-1]["line"]["width"] = 3
    return Plot(
        title="Training loss",
        caption="Mean loss since a worker's last report, over the images that all workers together had seen."
        + _of_all(figures),
        traces=lines,
        x="images seen by all workers",
        y="training loss",
        axes={"yaxis": {"rangemode": "nonnegative"}},
    )


def _rounds(together: Series, workers: int) -> list[Stretch]:
    # One point for about one report of every worker; a long series has merged some of them already.
    merged_already = together.added / len(together.stretches)
    return grouped(together.stretches, max(1, round(workers / merged_already)))


def _accuracy(figures: RunFigures, x: list[float]) -> list[dict[str, Any]]:
    return [
        _line("top-1", x, [event.test_top1 for event in figures.evaluations], _PALETTE[0])
        | {"mode": "lines+markers"},
        _line("top-5", x, [event.test_top5 for event in figures.evaluations], _PALETTE[1])
        | {"mode": "lines+markers"},
    ]


def _accuracies(figures: RunFigures) -> dict[str, Any]:
    tests = figures.evaluations
    return accuracy_axis([[each.test_top1 for each in tests], [each.test_top5 for each in tests]])


def _seconds(figures: RunFigures) -> str:
    return seconds_of(figures.ended.result if figures.ended else {})


def _whole_ticks(largest: float) -> dict[str, Any]:
    """Return an axis of whole numbers with about eight ticks, none of them between two numbers."""
    return {"tickformat": "d", "tick0": 0, "dtick": max(1, math.ceil(largest / 8))}


def _accuracy_over_epochs(figures: RunFigures) -> Plot | None:
    if not figures.evaluations:
        return None
    return Plot(
        title="Test accuracy over epochs",
        caption="Fraction of test images with the correct class as the most likely one, or among the five most likely.",
        traces=_accuracy(figures, [event.epoch for event in figures.evaluations]),
        x="epochs done",
        y="test accuracy",
        axes={"yaxis": _accuracies(figures), "xaxis": _whole_ticks(figures.evaluations[-1].epoch)},
    )


def _accuracy_over_time(figures: RunFigures) -> Plot | None:
    if not figures.evaluations:
        return None
    return Plot(
        title="Test accuracy over time",
        caption="The same, over the seconds since training started.",
        traces=_accuracy(figures, [event.time_s for event in figures.evaluations]),
        x=_seconds(figures),
        y="test accuracy",
        axes={"yaxis": _accuracies(figures)},
    )


def _images_per_s(figures: RunFigures) -> Plot | None:
    lines = _worker_lines(figures, lambda stretch: stretch.end_s, lambda stretch: stretch.images_per_s)
    if not any(value is not None for line in lines for value in line["y"]):
        return None
    return Plot(
        title="Speed of each worker",
        caption="Images per second since a worker's last report; a dip is a test, waiting or a slow host."
        + _of_all(figures),
        traces=lines,
        x=_seconds(figures),
        y="images/s",
        axes={"yaxis": {"rangemode": "tozero"}},
    )


def _staleness(figures: RunFigures) -> Plot | None:
    servers = sorted((server, part) for server, part in figures.staleness_of.items() if part.counts)
    if not servers:
        return None
    bars = [
        {
            "type": "bar",
            "name": f"server {server}",
            "x": list(part.histogram),
            "y": list(part.histogram.values()),
            "marker": {"color": color(index, len(servers))},
        }
        for index, (server, part) in enumerate(servers)
    ]
    return Plot(
        title="Staleness",
        caption=f"Updates between reading the parameters and applying the gradient: "
        f"mean {figures.staleness.mean:.2f}, largest {figures.staleness.max}.",
        traces=bars,
        x="staleness (updates)",
        y="gradients",
        axes={"barmode": "stack", "xaxis": _whole_ticks(figures.staleness.max), "bargap": 0.15},
    )


def _waiting(figures: RunFigures) -> Plot | None:
    totals = {worker: series.total for worker, series in sorted(figures.workers.items())[:_MOST_LINES]}
    # One bar compares nothing; its share stands among the figures of the run.
    if len(totals) < 2 or not any(total.wait_s > 0 for total in totals.values()):
        return None
    shares = _finite(total.waiting_share for total in totals.values())
    digits = 0 if max((share for share in shares if share is not None), default=0) > _SMALL_SHARE else 1
    bars = {
        "type": "bar",
        "x": list(totals),
        "y": shares,
        "marker": {"color": [color(index, len(totals)) for index in range(len(totals))]},
    }
    return Plot(
        title="Waiting",
        caption="Share of each worker's step time that it waited for other workers, servers or the network."
        + _of_all(figures),
        traces=[bars],
        x="worker",
        y="share of time",
        axes={"xaxis": {"type": "category"}, "yaxis": {"tickformat": f".{digits}%", "rangemode": "tozero"}},
    )


def _learning_rate(figures: RunFigures) -> Plot | None:
    rates = {stretch.learning_rate for series in figures.workers.values() for stretch in series.stretches}
    if len(rates) < 2:  # a constant needs no plot
        return None
    return Plot(
        title="Learning rate",
        caption="Learning rate at each report of a worker.",
        traces=_worker_lines(
            figures, lambda stretch: stretch.images_seen, lambda stretch: stretch.learning_rate
        ),
        x="images seen by all workers",
        y="learning rate",
        axes={"yaxis": {"rangemode": "tozero", "exponentformat": "power"}},
    )


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
        records = read_json_in_run(path, _MOST_BYTES)["traceEvents"]
        names = {each["tid"]: each["args"]["name"] for each in records if each.get("name") == "thread_name"}
        spans = [
            (each["tid"], each["name"], each["ts"] / 1e6, (each["ts"] + each["dur"]) / 1e6)
            for each in records
            if each.get("ph") == "X"
        ]
        if not all(isinstance(rank, int) for rank in names) or not all(
            isinstance(rank, int) and isinstance(what, str) for rank, what, _, _ in spans
        ):
            return None
    except (OSError, ValueError, ArithmeticError, KeyError, TypeError, AttributeError):
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
        shares = ", ".join(f"{names[rank]} {busy.get(rank, 0.0):.0%}" for rank in ranks)
        worked = f" Bars bear the numbers of microbatches; of the step's time, {shares} is work, and the rest waiting."
    return Plot(
        title="A step of the pipeline: work and waiting" if pipeline else "A step of all ranks",
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


FORMATS = ("png", "svg", "pdf")
FOLDER = "plots"
_WIDTH, _HEIGHT, _SCALE = 900, 540, 2
"""Size in CSS pixels; a PNG has `_SCALE` squared pixels for each."""


def write_plots(drawn: Sequence[Plot], folder: Path, formats: Collection[str]) -> list[Path]:
    """Write every plot into a folder, and return the files.

    Args:
        drawn: the plots of a page.
        folder: folder; created if missing.
        formats: formats, out of `FORMATS`.

    Raises:
        RequestError: a format is none of these, the extra `plots` or a browser is missing, or the folder cannot be
            written.
    """
    for name in formats:
        if name not in FORMATS:
            raise unknown("format of plots", name, FORMATS)
    try:
        import plotly.io
        from kaleido.errors import KaleidoError
        from plotly.graph_objects import Figure
    except ImportError:
        raise RequestError(
            "images of plots need plotly and kaleido: pip install 'polyrhythm[plots]'"
        ) from None
    figures, files = [], []
    for plot in drawn:
        figure = Figure(plot.to_json())
        figure.update_layout(title={"text": plot.title}, template="plotly_white", colorway=None)
        for name in formats:
            figures.append(figure)
            files.append(folder / f"{_slug(plot.title)}.{name}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if figures:
            plotly.io.write_images(fig=figures, file=files, width=_WIDTH, height=_HEIGHT, scale=_SCALE)
    except (KaleidoError, RuntimeError) as error:  # plotly raises RuntimeError if the browser is missing
        raise RequestError(
            "images of plots are drawn by Chrome or Chromium, which is missing or does not start "
            f"({type(error).__name__}): install one, or save single plots as SVG from the report itself"
        ) from None
    except OSError as error:
        raise RequestError(f"cannot write into {folder}: {error.strerror or error}") from None
    return files


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", title.lower()).strip("-")

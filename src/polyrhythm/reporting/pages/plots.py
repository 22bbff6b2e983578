"""The plots of a report, as descriptions that plotly draws in the browser.

Colours of text and grid come from the page, which may be light or dark.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polyrhythm.reporting.figures import grouped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
        """Return what plotly draws: `data` and `layout`."""
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
    """Return the colour of line `index` out of `of`."""
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


def _whole_ticks(largest: float) -> dict[str, Any]:
    """Return an axis of whole numbers with about eight ticks, none of them between two numbers."""
    return {"tickformat": "d", "tick0": 0, "dtick": max(1, math.ceil(largest / 8))}


def _accuracy_over_epochs(figures: RunFigures) -> Plot | None:
    if not figures.evaluations:
        return None
    return Plot(
        title="Test accuracy over epochs",
        caption="The fraction of test images whose class is the likeliest, or among the five likeliest.",
        traces=_accuracy(figures, [event.epoch for event in figures.evaluations]),
        x="epochs done",
        y="test accuracy",
        axes={"yaxis": {"tickformat": ".0%"}, "xaxis": _whole_ticks(figures.evaluations[-1].epoch)},
    )


def _accuracy_over_time(figures: RunFigures) -> Plot | None:
    if not figures.evaluations:
        return None
    return Plot(
        title="Test accuracy over time",
        caption="The same, over the seconds since training started.",
        traces=_accuracy(figures, [event.time_s for event in figures.evaluations]),
        x="seconds",
        y="test accuracy",
        axes={"yaxis": {"tickformat": ".0%"}},
    )


def _images_per_s(figures: RunFigures) -> Plot | None:
    lines = _worker_lines(figures, lambda stretch: stretch.end_s, lambda stretch: stretch.images_per_s)
    if not any(value is not None for line in lines for value in line["y"]):
        return None
    return Plot(
        title="Speed of each worker",
        caption="Images per second since a worker's last report; a dip is a test, a wait or a slow host."
        + _of_all(figures),
        traces=lines,
        x="seconds",
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
        caption=f"The share of each worker's time that it waited for others; "
        f"{100 * figures.waiting_share:.1f} % of all.{_of_all(figures)}",
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
        caption="The one in use when a worker reported.",
        traces=_worker_lines(
            figures, lambda stretch: stretch.images_seen, lambda stretch: stretch.learning_rate
        ),
        x="images seen by all workers",
        y="learning rate",
        axes={"yaxis": {"rangemode": "tozero", "exponentformat": "power"}},
    )

"""The plot of price against time in a comparison."""

from __future__ import annotations

from pathlib import Path

from polyrhythm.evaluation.target import Target
from polyrhythm.events import Evaluated
from polyrhythm.reporting import comparison as comparing
from polyrhythm.reporting.comparison import ComparedRun, Comparison, Row
from polyrhythm.reporting.pages.several_runs import comparison_plots


def row(name: str, seconds: float, price_per_s: float | None) -> Row:
    test = Evaluated(time_s=seconds, epoch=1, test_loss=0.1, test_top1=0.95, test_top5=1.0)
    run = ComparedRun(
        folder=Path(name),
        config={"strategy": name},
        known={"seconds": seconds, "images_per_s": 1.0, "workers": 1},
        outcome="done",
        tests=[comparing.Test(event=test, images=100)],
        losses=[],
        simulated=True,
        price_per_s=price_per_s,
    )
    return Row(strategy=name, workers=1, options={}, runs=[run])


def drawn(*rows: Row):
    comparison = Comparison(rows=rows, target=Target("top1", 0.9), chosen=True, warnings=())
    return next(
        (plot for plot in comparison_plots(comparison) if plot.title.startswith("Price against")), None
    )


def test_the_line_goes_along_those_that_none_beats_in_both() -> None:
    plot = drawn(row("a", 1, 9.0), row("b", 2, 2.5), row("c", 3, 2.0), row("d", 4, 1.25), row("e", 5, 0.2))
    assert plot is not None
    points, line = plot.traces
    assert (points["x"], points["y"]) == ([1, 2, 3, 4, 5], [9.0, 5.0, 6.0, 5.0, 1.0])
    assert (line["x"], line["y"]) == ([1, 2, 5], [9.0, 5.0, 1.0])
    assert plot.caption.endswith("a, 1 worker; b, 1 worker; e, 1 worker.")


def test_without_prices_there_is_none() -> None:
    assert drawn(row("a", 1, None), row("b", 2, None)) is None
    assert drawn(row("a", 1, 2.0)) is None

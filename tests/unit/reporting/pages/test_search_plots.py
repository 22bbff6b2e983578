"""The page of a search: the best trial's curve is always there, above all others."""

from __future__ import annotations

import pytest

from polyrhythm.reporting.pages.several_runs import MOST_CURVES, search_plots
from polyrhythm.reporting.search import Search, Tried


@pytest.mark.parametrize(
    ("count", "best"), [(5, 1), (MOST_CURVES + 30, 3), (MOST_CURVES + 30, MOST_CURVES + 29)]
)
def test_the_best_curve_is_drawn_last_and_strongly_whenever_it_was_made(count: int, best: int) -> None:
    trials = [
        Tried(
            number=number,
            folder=f"trial-{number}",
            parameters={"lr": 0.1},
            options={"lr": 0.1},
            value=0.9 if number == best else 0.5,
            state="done",
            curve=[(1, 0.4), (2, 0.9 if number == best else 0.5)],
        )
        for number in range(count)
    ]
    search = Search(
        method="random",
        goal="top1",
        budget=f"{count} trials",
        maximize=True,
        simulated=False,
        trials=trials,
        importance={},
    )
    curves = next(plot for plot in search_plots(search) if plot.title == "Learning curves")
    names = [trace["name"] for trace in curves.traces]
    assert names[-1] == f"trial {best}"
    assert len(names) == len(set(names)) == min(count, MOST_CURVES)
    assert [trace["line"]["width"] for trace in curves.traces].count(3) == 1
    assert curves.traces[-1]["line"]["width"] == 3
    assert curves.axes["xaxis"] == {"dtick": 1}

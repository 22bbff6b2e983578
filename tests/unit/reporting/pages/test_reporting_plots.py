import math

import plotly.graph_objects as go
import pytest

from polyrhythm.events import Evaluated, RunStarted, WorkerProgress
from polyrhythm.reporting.figures import RunFigures
from polyrhythm.reporting.pages.plots import plots


def by_title(figures):
    return {plot.title: plot for plot in plots(figures)}


def run_of(workers, learning_rates=(0.1, 0.2), loss=1.0):
    yield RunStarted(
        time_s=0.0,
        strategy="s",
        data="d",
        model="m",
        workers=workers,
        servers=0,
        epochs=1,
        steps_per_epoch=2,
    )
    for step, learning_rate in enumerate(learning_rates, start=1):
        for worker in range(workers):
            yield WorkerProgress(
                time_s=float(step),
                worker=worker,
                epoch=0,
                step=step,
                steps=1,
                images=8,
                loss=loss,
                learning_rate=learning_rate,
            )


def test_plots_hold_the_figures(story):
    found = by_title(RunFigures.of(story))
    loss = {trace["name"]: (trace["x"], trace["y"]) for trace in found["Training loss"].traces}
    assert loss == {
        "worker 0": ([400, 920], [1.0, 0.5]),
        "worker 1": ([600, 1040], [2.5, 0.25]),
        "all workers": ([600, 1040], [1.5, (320 * 0.5 + 120 * 0.25) / 440]),
    }
    top1, top5 = found["Test accuracy over epochs"].traces
    assert (top1["x"], top1["y"], top5["y"]) == ([1, 2], [0.8125, 0.90625], [0.96875, 0.984375])
    assert found["Test accuracy over time"].traces[0]["x"] == [4.5, 9.0]
    assert found["Speed of each worker"].traces[1]["y"] == [50.0, 30.0]
    assert found["Waiting"].traces[0]["y"] == [0.5 / 6, 0.5]
    first, second = found["Staleness"].traces
    assert (first["x"], first["y"]) == ([0, 1, 2], [6, 12, 2])
    assert (second["x"], second["y"]) == ([0, 3], [8, 4])
    assert found["Learning rate"].traces[0]["y"] == [0.1, 0.05]


@pytest.mark.parametrize(("tests", "cut"), [(2, 0), (9, 0), (20, 2)])
def test_only_the_first_tenth_of_an_accuracy_curve_may_lie_outside_its_plot(tests, cut):
    events = [
        Evaluated(time_s=float(n), epoch=n, test_loss=1.0, test_top1=n / 100, test_top5=0.9)
        for n in range(1, tests + 1)
    ]
    plot = by_title(RunFigures.of([*run_of(1), *events]))["Test accuracy over epochs"]
    low = plot.axes["yaxis"]["range"][0]
    assert sum(accuracy < low for accuracy in plot.traces[0]["y"]) <= cut
    assert plot.traces[0]["y"][cut] >= low


@pytest.mark.parametrize("workers", [1, 2, 40])
def test_plotly_accepts_every_plot(story, workers):
    for events in (story, list(run_of(workers))):
        found = plots(RunFigures.of(events))
        assert found
        for plot in found:
            described = plot.to_json()
            # Raises an error about what plotly does not know.
            figure = go.Figure(data=described["data"], layout=described["layout"])
            assert [trace.name for trace in figure.data] == [trace.get("name") for trace in plot.traces]


def test_plots_without_data_are_left_out():
    assert plots(RunFigures()) == []
    assert set(by_title(RunFigures.of(run_of(1)))) == {
        "Training loss",
        "Speed of each worker",
        "Learning rate",
    }
    constant = by_title(RunFigures.of(run_of(2, learning_rates=(0.1, 0.1))))
    assert set(constant) == {"Training loss", "Speed of each worker"}


def test_one_worker_has_one_line_and_a_crowd_has_no_legend():
    (line,) = by_title(RunFigures.of(run_of(1)))["Training loss"].traces
    assert line["name"] == "worker 0"
    crowd = by_title(RunFigures.of(run_of(40)))["Training loss"]
    assert len(crowd.traces) == 41
    assert crowd.to_json()["layout"]["showlegend"] is False
    assert len({trace["line"]["color"] for trace in crowd.traces}) == 41


def test_the_line_of_all_workers_has_about_a_point_a_round_however_long_the_run():
    rounds = 50
    crowd = by_title(RunFigures.of(run_of(128, learning_rates=(0.1,) * rounds)))["Training loss"]
    points = len(crowd.traces[-1]["x"])
    assert rounds / 2 <= points <= rounds * 2
    assert crowd.traces[-1]["x"][-1] == 128 * rounds * 8


def test_a_loss_that_is_not_finite_is_a_gap():
    (line,) = by_title(RunFigures.of(run_of(1, loss=math.inf)))["Training loss"].traces
    assert line["y"] == [None, None]


def test_a_dry_run_whose_successor_says_hello_has_no_plot_of_losses():
    hello = WorkerProgress(
        time_s=3.0, worker=1, epoch=0, step=2, steps=0, images=0, loss=0.0, learning_rate=0.0
    )
    assert "Training loss" not in by_title(RunFigures.of([*run_of(2, loss=math.nan), hello]))


@pytest.mark.parametrize(("wait_s", "written"), [(0.02, ".1%"), (0.5, ".0%")])
def test_small_shares_of_waiting_are_told_apart(wait_s, written):
    waiting = WorkerProgress(
        time_s=2.0, worker=0, epoch=0, step=2, steps=1, images=8, loss=1.0, learning_rate=0.1, wait_s=wait_s
    )
    plot = by_title(RunFigures.of([*run_of(2, learning_rates=(0.1,)), waiting]))["Waiting"]
    assert plot.axes["yaxis"]["tickformat"] == written


@pytest.mark.parametrize(("epochs", "between"), [(1, 1), (2, 1), (8, 1), (20, 3), (90, 12)])
def test_ticks_of_epochs_are_whole_numbers(epochs, between):
    tested = [
        Evaluated(time_s=float(epoch), epoch=epoch, test_loss=1.0, test_top1=0.5, test_top5=0.9)
        for epoch in range(1, epochs + 1)
    ]
    plot = by_title(RunFigures.of([*run_of(1), *tested]))["Test accuracy over epochs"]
    assert (plot.axes["xaxis"]["tick0"], plot.axes["xaxis"]["dtick"]) == (0, between)

import math

import pytest

from polyrhythm.reporting.figures import RunFigures
from polyrhythm.reporting.quantities import counted, duration, percent, significant, whole
from polyrhythm.reporting.tables import class_rows, columns, fact_rows, facts, text


def test_facts_come_from_events_where_there_is_no_result(story):
    known = facts(RunFigures.of(story))
    assert known == {
        "strategy": "parameter_server(servers=2, consistency=asynchronous)",
        "data": "fashion-mnist",
        "model": "lenet5",
        "parameters": 61706,
        "workers": 2,
        "servers": 2,
        "epochs": 2,
        "seconds": 9.0,
        "images_per_s": 130.0,
        "train_loss": 190 / 440,
        "steps": 18,
        "waiting_share": 4.5 / 14,
        "test_loss": 0.5,
        "test_top1": 0.90625,
        "test_top5": 0.984375,
        "staleness": {"mean": 28 / 32, "max": 3},
    }


def test_figures_of_the_result_win_unless_they_are_missing(story, ended):
    figures = RunFigures.of([*story, ended])
    figures.ended.result["train_loss"] = None
    known = facts(figures)
    assert known["test_top1"] == 0.904
    assert known["train_loss"] == 190 / 440


def test_rows_are_written_in_a_fixed_order_and_unknown_ones_follow():
    known = {
        "odd": True,
        "nothing_left_share": 0.5,
        "test_top1": 0.5,
        "strategy": "synchronous",
        "seconds": 61.25,
        "per_class": [],
    }
    assert fact_rows(known) == [
        ("Strategy", "synchronous"),
        ("Time", "0:01:01 (61.2 s)"),
        ("Test top-1", "50.0 %"),
        ("Odd", "yes"),
    ]


def test_a_figure_of_another_shape_is_shown_as_it_is():
    assert fact_rows({"staleness": {"mean": None}}) == [("Staleness", "mean –")]


@pytest.mark.parametrize(
    ("per_class", "rows"),
    [
        ({"cat": 0.5}, [{"class": "cat", "accuracy": 0.5}]),
        ({"cat": {"recall": 0.5, "images": 3}}, [{"class": "cat", "recall": 0.5, "images": 3}]),
        ([{"name": "cat", "recall": 0.5}], [{"name": "cat", "recall": 0.5}]),
        ([0.5], []),
    ],
)
def test_figures_by_class_of_any_shape_become_rows(per_class, rows):
    assert class_rows(per_class) == rows


def test_columns_are_those_of_all_rows():
    assert columns([{"name": 1, "recall": 2}, {"name": 1, "images": 3}]) == ["name", "recall", "images"]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (True, "yes"),
        (None, "–"),
        (12345, "12,345"),
        (0.1234567, "0.123457"),
        ("x", "x"),
        ([1, "ä"], '[1, "ä"]'),
    ],
)
def test_any_value_has_a_text(value, written):
    assert text(value) == written


def test_quantities_are_written_for_people():
    told = {59.94: "59.9 s", 59.95: "0:01:00", 60.6: "0:01:01", 3600 * 30 + 62: "30:01:02"}
    told |= {0: "0 s", -1: "0 s", 0.00036: "0.36 ms", 0.0234: "23 ms", 0.0994: "99 ms", 0.0995: "0.1 s"}
    assert {seconds: duration(seconds) for seconds in told} == told
    assert fact_rows({"seconds": 0.812}) == [("Time", "0.8 s")]
    assert (whole(5811.6), percent(0.90375), significant(0.41234), significant(1e-5)) == (
        "5,812",
        "90.4 %",
        "0.412",
        "1e-05",
    )
    assert [duration(math.nan), whole(math.inf), percent(math.nan), significant(math.nan)] == [
        "–",
        "–",
        "–",
        "nan",
    ]
    near = {0.9999: "99.99 %", 0.99996: "99.996 %", 0.99949: "99.9 %", 1.0: "100.0 %", 0.00004: "0.0 %"}
    assert {fraction: percent(fraction) for fraction in near} == near
    assert (counted(1, "server"), counted(1200, "worker")) == ("1 server", "1,200 workers")


def test_what_servers_kept_out_is_said_where_there_was_any():
    nothing = {"messages_refused": {}, "gradients_not_finite": 0, "workers_ejected": 0}
    assert fact_rows(nothing) == []
    some = {"messages_refused": {"payload": 3, "step": 1}, "gradients_not_finite": 5, "workers_ejected": 1}
    assert fact_rows(some) == [
        ("Workers evicted by servers", "1"),
        ("Gradients left out, not finite", "5"),
        ("Messages refused", "3 payload, 1 step"),
    ]

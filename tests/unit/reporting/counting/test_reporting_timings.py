"""Where steps went: waiting told from communication, as a table, in the report and as a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyrhythm.events import Event, RunStarted, WorkerLost, WorkerTimings
from polyrhythm.reporting.event_log import EventLog
from polyrhythm.reporting.figures import RunFigures
from polyrhythm.reporting.loggers import StepTrace
from polyrhythm.reporting.pages.report import write_report
from polyrhythm.reporting.timings import PARTS, Timings, timing_lines, timing_table


def told(
    worker: int, communication: list[list[float]], *, in_step: bool = True, **seconds: float
) -> WorkerTimings:
    return WorkerTimings(
        time_s=1.0,
        worker=worker,
        step=int(communication[-1][0]),
        steps=len(communication),
        communication_s=sum(each for _, each in communication),
        in_step=in_step,
        communication=communication if in_step else [],
        **seconds,
    )


def started(workers: int) -> RunStarted:
    return RunStarted(
        time_s=0,
        strategy="synchronous",
        data="digits",
        model="mlp",
        workers=workers,
        servers=0,
        epochs=1,
        steps_per_epoch=3,
    )


def test_waiting_is_what_a_worker_stands_still_longer_than_the_one_that_does_so_least() -> None:
    timings = Timings()
    assert not timings
    timings.add(told(0, [[1, 0.5], [2, 0.25]], forward_s=1.0, other_s=0.125), 2)
    timings.add(told(1, [[1, 0.125]], forward_s=2.0), 2)
    timings.add(told(1, [[2, 1.0], [3, 0.5]], backward_s=4.0), 2)
    timings.add(told(0, [[3, 0.5]], data_s=0.25), 2)
    assert timings
    first, second = timings.of_workers()
    assert first.seconds == {
        "data": 0.25,
        "forward": 1.0,
        "backward": 0.0,
        "update": 0.0,
        "communication": 0.125 + 0.25 + 0.5,
        "waiting": 0.375,
        "other": 0.125,
    }
    assert (second.seconds["communication"], second.seconds["waiting"]) == (0.125 + 0.25 + 0.5, 0.75)
    assert (first.steps, second.steps) == (3, 3)
    assert first.total_s == 0.25 + 1.0 + 1.25 + 0.125
    assert timings.to_json()["workers"][0] == {
        "worker": 0,
        "steps": 3,
        "seconds": first.total_s,
        **{f"{part}_s": first.seconds[part] for part in PARTS},
    }


def test_free_running_workers_wait_for_nobody_that_is_known() -> None:
    timings = Timings()
    timings.add(told(0, [[1, 0.5]], in_step=False), 2)
    timings.add(told(1, [[1, 0.125]], in_step=False), 2)
    assert not timings.shows_waiting
    assert [parts.seconds["communication"] for parts in timings.of_workers()] == [0.5, 0.125]
    assert [parts.seconds["waiting"] for parts in timings.of_workers()] == [0.0, 0.0]
    assert timing_table(timings.to_json())[1][-2] == "–"


def test_a_lost_worker_is_not_waited_for_to_tell() -> None:
    events: list[Event] = [
        started(3),
        told(0, [[1, 0.5]]),
        told(1, [[1, 0.25]]),
        WorkerLost(time_s=1.0, worker=2, rank=2, step=0),
        told(0, [[2, 1.0]]),
        told(1, [[2, 0.5]]),
    ]
    figures = RunFigures.of(events)
    for _ in range(2):  # asking changes nothing
        waited = {parts.worker: parts.seconds["waiting"] for parts in figures.timings.of_workers()}
        assert waited == {0: 0.25 + 0.5, 1: 0.0}


def test_steps_that_nobody_else_tells_of_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyrhythm.reporting.timings._OPEN_STEPS", 5)
    timings = Timings()
    for step in range(20):
        timings.add(told(0, [[step, 1.0]]), 3)
        timings.add(told(1, [[step, 3.0]]), 3)
    assert len(timings._open) <= 5
    assert [parts.seconds["waiting"] for parts in timings.of_workers()] == [0.0, pytest.approx(40.0, abs=2.0)]


def figures_of(workers: int) -> dict[str, object]:
    timings = Timings()
    for worker in range(workers):
        timings.add(told(worker, [[1, 0.25], [2, 0.25]], forward_s=1.0, backward_s=0.5), workers)
    return timings.to_json()


def test_the_table_is_in_milliseconds_a_step() -> None:
    rows = timing_table(figures_of(2))
    assert rows == [
        [
            "worker",
            "steps",
            "step",
            "data",
            "forward",
            "backward",
            "update",
            "communication",
            "waiting",
            "other",
        ],
        ["0", "2", "1000.00", "0.00", "500.00", "250.00", "0.00", "250.00", "0.00", "0.00"],
        ["1", "2", "1000.00", "0.00", "500.00", "250.00", "0.00", "250.00", "0.00", "0.00"],
        ["all", "4", "1000.00", "0.00", "500.00", "250.00", "0.00", "250.00", "0.00", "0.00"],
        ["share", "", "100.0 %", "0.0 %", "50.0 %", "25.0 %", "0.0 %", "25.0 %", "0.0 %", "0.0 %"],
    ]
    heading, *lines = timing_lines(figures_of(2))
    assert heading == "Where a step's time goes, in milliseconds"
    assert len({len(line) for line in lines}) == 1
    assert [line.split()[0] for line in lines] == ["worker", "0", "1", "all", "share"]


def test_of_many_workers_only_some_have_a_row() -> None:
    rows = timing_table(figures_of(1000))
    assert [row[0] for row in rows] == ["worker", *map(str, range(16)), "984 more", "all", "share"]
    assert rows[-2][1:3] == ["2,000", "1000.00"]


def test_the_report_shows_the_table_where_it_is_told(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.on_event(started(1))
    log.close()
    assert "Where a step" not in write_report(tmp_path).read_text()
    log = EventLog(tmp_path / "events.jsonl")
    log.on_event(told(0, [[1, 0.25], [2, 0.25]], forward_s=1.0))
    log.close()
    html = write_report(tmp_path).read_text()
    assert "Where a step&#x27;s time goes" in html
    assert ">500.00</td>" in html
    assert "Neither includes what was overlapped with computing" in html


def test_spans_become_a_trace_and_without_any_there_is_none(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path / "trace.json")
    trace.on_event(started(2))
    trace.on_event(told(0, [[1, 0.25]]))
    trace.close()
    assert not (tmp_path / "trace.json").exists()
    spans = [["forward", 0.5, 1.0], ["communication: receive", 0.75, 1.0]]
    trace.on_event(WorkerTimings(time_s=1, worker=1, step=1, steps=1, spans=spans))
    trace.close()
    records = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [record["args"]["name"] for record in records if record["ph"] == "M"] == [
        "mlp on digits: synchronous",
        "worker 1",
    ]
    shown = [
        (record["name"], record["tid"], record["ts"], record["dur"])
        for record in records
        if record["ph"] == "X"
    ]
    assert shown == [
        ("forward", 1, 500_000.0, 500_000.0),
        ("communication: receive", 1, 750_000.0, 250_000.0),
    ]

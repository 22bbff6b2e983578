"""The timeline of a step, from a trace."""

from __future__ import annotations

import json
from pathlib import Path

from polyrhythm.chrome_trace import TraceRank, write_trace
from polyrhythm.reporting.pages.plots import timeline


def trace(path: Path, ranks: int = 2) -> Path:
    """Writes four steps of 10 ms of each rank, of which it computes 6 and waits 4; each rank is 1 ms later."""
    records = []
    for rank in range(ranks):
        place = TraceRank(0, rank)
        records += place.named("host", f"worker {rank}")
        for step in range(4):
            start = 0.01 * step + 0.001 * (rank % 4)
            records.append(place.does("compute", start, start + 0.006))
            records.append(place.does("wait", start + 0.006, start + 0.01))
    write_trace(path, records)
    return path


def test_a_step_from_the_middle_is_shown_of_every_rank(tmp_path: Path) -> None:
    plot = timeline(trace(tmp_path / "trace.json"))
    assert plot is not None
    computing, waiting = plot.traces
    assert (computing["name"], waiting["name"]) == ("compute", "wait")
    bars = sorted(zip(computing["y"], computing["base"], computing["x"], strict=True))
    # From 1 ms before the step that begins at 10 ms until 1 ms after its end.
    assert bars == [("worker 0", 0.0, 6.0), ("worker 0", 10.0, 1.0), ("worker 1", 1.0, 6.0)]
    assert sorted(zip(waiting["y"], waiting["base"], waiting["x"], strict=True)) == [
        ("worker 0", -1.0, 1.0),
        ("worker 0", 6.0, 4.0),
        ("worker 1", -1.0, 2.0),
        ("worker 1", 7.0, 4.0),
    ]
    assert "at 0.010 s" in plot.caption
    assert plot.axes["yaxis"]["categoryarray"] == ["worker 1", "worker 0"]


def test_of_many_ranks_the_first_are_shown(tmp_path: Path) -> None:
    plot = timeline(trace(tmp_path / "trace.json", ranks=40))
    assert plot is not None
    assert len(set(plot.traces[0]["y"])) == 32
    assert "the first 32 of 40 ranks" in plot.caption


def test_without_a_readable_trace_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert timeline(path) is None
    for text in ("{", "[]", json.dumps({"traceEvents": []}), json.dumps({"traceEvents": [{"ph": "X"}]})):
        path.write_text(text)
        assert timeline(path) is None


def pipelined(path: Path, waiting: str) -> Path:
    """Writes three steps of 12 ms of two stages with two microbatches, as 1F1B has them, each unit 2 ms long."""
    rows = {
        0: "forward 0;forward 1;wait;backward 0;wait;backward 1",
        1: "wait;forward 0;backward 0;forward 1;backward 1;wait",
    }
    records = []
    for rank, row in rows.items():
        place = TraceRank(0, rank)
        records += place.named("host", f"worker {rank}")
        for step in range(3):
            for column, what in enumerate(row.split(";")):
                start = 0.012 * step + 0.002 * column
                records.append(place.does(waiting if what == "wait" else what, start, start + 0.002))
    write_trace(path, records)
    return path


def test_of_a_pipeline_every_microbatch_is_shown_and_who_waited(tmp_path: Path) -> None:
    plot = timeline(pipelined(tmp_path / "trace.json", "wait"))
    assert plot is not None
    assert [trace["name"] for trace in plot.traces] == ["forward", "backward", "wait"]
    forward, backward, _ = plot.traces
    inside = {
        (row, start, number)
        for row, start, number in zip(forward["y"], forward["base"], forward["text"], strict=True)
        if 0 <= start < 12
    }
    assert inside == {
        ("worker 0", 0.0, "0"),
        ("worker 0", 2.0, "1"),
        ("worker 1", 2.0, "0"),
        ("worker 1", 6.0, "1"),
    }
    assert set(backward["text"]) == {"0", "1"}
    assert "at 0.012 s" in plot.caption
    assert "worker 0 67%, worker 1 67% is work" in plot.caption
    assert "work and waiting" in plot.title


def test_a_real_pipeline_s_communication_is_its_waiting(tmp_path: Path) -> None:
    plot = timeline(pipelined(tmp_path / "trace.json", "communication: receive"))
    assert plot is not None
    assert [trace["name"] for trace in plot.traces] == ["forward", "backward"]

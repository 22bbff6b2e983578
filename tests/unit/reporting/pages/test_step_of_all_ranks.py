"""The timeline of a step, from a trace."""

from __future__ import annotations

import json
from pathlib import Path

from polyrhythm.chrome_trace import TraceRank, write_trace
from polyrhythm.reporting.pages.timeline import timeline


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

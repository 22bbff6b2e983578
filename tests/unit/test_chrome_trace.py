"""Records of a trace."""

from __future__ import annotations

import json
from pathlib import Path

from polyrhythm.chrome_trace import TraceRank, write_trace


def test_records_are_those_of_the_trace_event_format(tmp_path: Path) -> None:
    place = TraceRank(host=2, rank=7)
    records = [
        *place.named("host 2", "worker 3"),
        place.does("wait", 0.25, 0.75, why="a message"),
        *place.sends(5, "server 0", 512, 1.0, 1.5),
    ]
    write_trace(tmp_path / "trace.json", records)
    written = json.loads((tmp_path / "trace.json").read_text())
    assert written["displayTimeUnit"] == "ms"
    where = {"pid": 2, "tid": 7}
    sending = {"name": "send to server 0", "cat": "send", "id": 5, **where}
    assert written["traceEvents"] == [
        {"ph": "M", **where, "name": "process_name", "args": {"name": "host 2"}},
        {"ph": "M", **where, "name": "thread_name", "args": {"name": "worker 3"}},
        {
            "ph": "X",
            "name": "wait",
            "cat": "wait",
            "ts": 250_000.0,
            "dur": 500_000.0,
            **where,
            "args": {"why": "a message"},
        },
        {**sending, "ph": "b", "ts": 1_000_000.0, "args": {"bytes": 512}},
        {**sending, "ph": "e", "ts": 1_500_000.0},
    ]

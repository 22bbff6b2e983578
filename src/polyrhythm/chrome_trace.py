"""Trace records for Perfetto and chrome://tracing.

The format: "Trace Event Format", Google 2016. A host is a process, a rank a thread. Consecutive activities of a rank
are complete events ("X"), which may be nested; concurrent ones are asynchronous events ("b", "e"). Times are given in
seconds and written in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class TraceRank:
    """The position of a rank in a trace.

    Attributes:
        host: number of the host.
        rank: rank of the track.
    """

    host: int
    rank: int

    def named(self, host_name: str, rank_name: str) -> list[Record]:
        """Return the records of the names of host and rank."""
        place = {"ph": "M", "pid": self.host, "tid": self.rank}
        return [
            {**place, "name": "process_name", "args": {"name": host_name}},
            {**place, "name": "thread_name", "args": {"name": rank_name}},
        ]

    def does(self, what: str, start_s: float, end_s: float, **known: Any) -> Record:
        """Return the record of an activity of the rank, with further facts about it."""
        return {
            "ph": "X",
            "name": what,
            "cat": what,
            "ts": start_s * 1e6,
            "dur": (end_s - start_s) * 1e6,
            "pid": self.host,
            "tid": self.rank,
            "args": known,
        }

    def sends(self, number: int, to: str, nbytes: int, start_s: float, end_s: float) -> list[Record]:
        """Return the records of a message, with a number of its own, that leaves while the rank does something else."""
        both = {"name": f"send to {to}", "cat": "send", "id": number, "pid": self.host, "tid": self.rank}
        return [
            {**both, "ph": "b", "ts": start_s * 1e6, "args": {"bytes": nbytes}},
            {**both, "ph": "e", "ts": end_s * 1e6},
        ]


def write_trace(path: Path, records: Sequence[Record]) -> None:
    """Writes a trace file."""
    text = json.dumps({"traceEvents": records, "displayTimeUnit": "ms"}, allow_nan=False)
    path.write_text(text, encoding="utf-8")

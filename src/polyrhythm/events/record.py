"""Events as JSON objects, and back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from polyrhythm.events.event import Event
from polyrhythm.events.losses import WorkerJoined, WorkerLost
from polyrhythm.events.notices import Notice, Restarted, ServerJoined, ServerLost, Straggler
from polyrhythm.events.progress import CacheUsed, ServerProgress, WorkerProgress, WorkerTimings
from polyrhythm.events.run import CheckpointSaved, Evaluated, RunEnded, RunStarted

_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        RunStarted,
        WorkerProgress,
        WorkerTimings,
        CacheUsed,
        ServerProgress,
        Evaluated,
        CheckpointSaved,
        WorkerLost,
        WorkerJoined,
        Notice,
        Straggler,
        ServerLost,
        ServerJoined,
        Restarted,
        RunEnded,
    )
}
_FIELDS = {kind: frozenset(each.name for each in fields(kind)) for kind in _KINDS.values()}


def from_json(record: dict[str, Any]) -> Event:
    """Rebuilds an event from `Event.to_json`'s dict.

    Raises:
        ValueError: the record names no known event or lacks one of its fields.
    """
    kind = _KINDS.get(record.get("event", ""))
    if kind is None:
        raise ValueError(f"no such event: {record.get('event')!r}")
    values = {name: value for name, value in record.items() if name in _FIELDS[kind]}
    if "staleness" in values:
        values["staleness"] = {int(key): int(count) for key, count in values["staleness"].items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from None

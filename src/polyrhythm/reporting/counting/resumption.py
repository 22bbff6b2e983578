"""A log that was resumed, read as one run.

A resumed run appends to the log of the part before it, its clock starts again at 0, and it redoes what came
after the checkpoint that it resumed from:

    first part    |---epoch 0---|---epoch 1---C--epoch 2--x        C: checkpoint, x: killed
    second part                               |---epoch 2---|---epoch 3---|
    one run       |---epoch 0---|---epoch 1---|---epoch 2---|---epoch 3---|
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from polyrhythm.events import (
    CacheUsed,
    CheckpointSaved,
    Evaluated,
    Event,
    RunEnded,
    RunStarted,
    ServerProgress,
    WorkerProgress,
    WorkerTimings,
)

if TYPE_CHECKING:
    from collections.abc import Iterable


def as_one_run(events: Iterable[Event]) -> list[Event]:
    """Drops what a resumed run did again, and moves every part behind the one before it in time."""
    kept: list[Event] = []
    shift_s = 0.0
    for event in events:
        if isinstance(event, RunStarted) and kept:
            checkpoint = _resumed_from(kept, event)
            kept = [old for old in kept if _counts(old, checkpoint)]
            shift_s = max(0.0, checkpoint.time_s - event.time_s)
        kept.append(replace(event, time_s=event.time_s + shift_s))
    return kept


def _resumed_from(events: list[Event], start: RunStarted) -> CheckpointSaved:
    for event in reversed(events):
        if isinstance(event, CheckpointSaved) and event.epoch == start.start_epoch:
            return event
    # No checkpoint of that epoch was logged: cut where that epoch began, as well as the steps tell.
    step = start.start_step or start.start_epoch * start.steps_per_epoch
    done = [event.time_s for event in events if isinstance(event, WorkerProgress) and event.step <= step]
    return CheckpointSaved(time_s=max(done, default=0.0), path="", epoch=start.start_epoch, step=step)


def _counts(event: Event, checkpoint: CheckpointSaved) -> bool:
    match event:
        case WorkerProgress() | WorkerTimings():
            return event.step <= checkpoint.step
        case Evaluated():
            return event.epoch <= checkpoint.epoch
        case ServerProgress() | CacheUsed():
            return event.time_s <= checkpoint.time_s
        case RunStarted() | RunEnded():
            return False
        case _:
            return True

"""Events as JSON objects, and back."""

import json
from dataclasses import fields

import pytest

from polyrhythm.events import (
    BatchesBalanced,
    Event,
    ImagesLeftOut,
    Logged,
    RunStarted,
    ServerProgress,
    StateDiffers,
    WorkerProgress,
    from_json,
)

VALUES = {"str": "a", "int": 3, "float": 0.5, "bool": True}


def kinds(kind=Event):
    for each in kind.__subclasses__():
        yield each
        yield from kinds(each)


@pytest.mark.parametrize(
    "kind", sorted(kinds(), key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__
)
def test_every_kind_of_event_comes_back_from_its_line(kind):
    event = kind(
        **{each.name: VALUES[each.type] for each in fields(kind) if each.type in VALUES}, **rest(kind)
    )

    again = from_json(json.loads(json.dumps(event.to_json())))

    assert type(again) is kind
    assert again == event


def rest(kind):
    """Gives what is no plain number or text."""
    if kind is ServerProgress:
        return {"staleness": {0: 5, 7: 1}}
    if kind is RunStarted:
        return {"begun": {"stretches": [[2, 3]]}}
    if kind is Logged:
        return {"values": {"accuracy": 0.5}}
    if kind is ImagesLeftOut:
        return {"files": ["a.png", "b.png"]}
    if kind is StateDiffers:
        return {"workers": [1], "after_step": None, "returned_to": 20}
    if kind is BatchesBalanced:
        return {"sizes": [48, 16]}
    return {each.name: {"steps": 4} for each in fields(kind) if each.name == "result"}


def test_what_a_newer_version_adds_is_left_out():
    record = WorkerProgress(
        time_s=1.0, worker=0, epoch=0, step=1, steps=1, images=8, loss=2.0, learning_rate=0.1
    )

    assert from_json(record.to_json() | {"mood": "good"}) == record


@pytest.mark.parametrize("record", [{}, {"event": "Sung"}, {"event": "Event"}])
def test_what_is_no_event_is_named(record):
    with pytest.raises(ValueError, match="no such event"):
        from_json(record)


def test_a_field_that_is_missing_is_named():
    with pytest.raises(ValueError, match=r"WorkerLost.*'rank' and 'step'"):
        from_json({"event": "WorkerLost", "time_s": 1.0, "worker": 2})

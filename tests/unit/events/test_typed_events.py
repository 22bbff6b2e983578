"""Events read from a file of another person: values have their types, or a line is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyrhythm.errors import RequestError
from polyrhythm.reporting.event_log import read_events

STARTED = {
    "event": "RunStarted", "time_s": 0.0, "strategy": "synchronous", "data": "digits", "model": "mlp", "workers": 2,
    "servers": 0, "epochs": 1, "steps_per_epoch": 4,
}  # fmt: skip
ENDED = {"event": "RunEnded", "time_s": 1.0, "outcome": "done", "result": {}}
SERVER = {"event": "ServerProgress", "time_s": 1.0, "server": 0, "version": 3, "staleness": {"1": 2}}


def refused(path: Path, record: Any) -> str:
    path.write_text(f"{json.dumps(STARTED)}\n{json.dumps(record)}\n")
    with pytest.raises(RequestError) as refusal:
        read_events(path)
    assert len(str(refusal.value).splitlines()) == 1
    assert f"{path}: line 2 is damaged" in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        (STARTED | {"workers": "2"}, "its workers is '2'"),
        (STARTED | {"workers": True}, "its workers is True"),
        (STARTED | {"workers": 2.0}, "its workers is 2.0"),
        (STARTED | {"workers": 10**30}, "its workers is 1000"),
        (STARTED | {"data": ["digits"]}, "its data is ['digits']"),
        (STARTED | {"time_s": None}, "its time_s is None"),
        (SERVER | {"server": "<img src=x onerror=alert(1)>"}, "its server is '<img src=x"),
        (SERVER | {"staleness": {"one": 2}}, "invalid literal"),
        (ENDED | {"result": []}, "its result is []"),
        (ENDED | {"result": {"test_top1": "0.9"}}, "its test_top1 is '0.9'"),
        (ENDED | {"result": {"confusion": [[1], ["x"]]}}, "its confusion is"),
        (ENDED | {"result": {"test_top1_interval": [0.1]}}, "its test_top1_interval is [0.1]"),
        (ENDED | {"result": {"per_class": [{"name": "a", "recall_interval": 3}]}}, "its per_class is"),
        ({"event": ["RunEnded"]}, "no such event: ['RunEnded']"),
        ([1], "not an object"),
    ],
)
def test_a_value_of_another_type_is_named_with_its_line(record: Any, complaint: str, tmp_path: Path) -> None:
    assert complaint in refused(tmp_path / "events.jsonl", record)


def test_a_line_that_is_nested_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for line in (
        "[" * 100_000,
        '{"event": ' + "[" * 100_000,
        '{"event":' + '{"a":' * 100_000 + "}" * 100_001,
    ):
        path.write_text(f"{line}\n")
        with pytest.raises(RequestError, match="line 1 is damaged") as refusal:
            read_events(path)
        assert len(str(refusal.value)) < 500


def test_whole_numbers_stand_for_numbers(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps(STARTED | {"time_s": 3}) + "\n" + json.dumps(SERVER) + "\n")
    started, server = read_events(path)
    assert started.time_s == 3
    assert server.staleness == {1: 2}  # type: ignore[attr-defined]

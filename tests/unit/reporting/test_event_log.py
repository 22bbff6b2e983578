import json
import math
from dataclasses import replace

import pytest

from polyrhythm.errors import RequestError
from polyrhythm.events import (
    CheckpointSaved,
    Evaluated,
    Notice,
    RunEnded,
    RunStarted,
    ServerProgress,
    WorkerJoined,
    WorkerLost,
    WorkerProgress,
)
from polyrhythm.reporting.event_log import EventLog, read_events

STARTED = RunStarted(
    time_s=0.0,
    strategy="mixed(groups=2)",
    data="digits",
    model="mlp",
    workers=4,
    servers=1,
    epochs=2,
    steps_per_epoch=9,
)
WORKED = WorkerProgress(
    time_s=1.5, worker=3, epoch=0, step=4, steps=4, images=256, loss=0.5, learning_rate=0.1
)
EVERY_KIND = [
    STARTED,
    WORKED,
    ServerProgress(time_s=1.75, server=0, version=7, staleness={0: 2, 11: 1}),
    Evaluated(time_s=2.0, epoch=1, test_loss=0.25, test_top1=0.875, test_top5=1.0),
    CheckpointSaved(time_s=2.25, path="checkpoints/1", epoch=1, step=9),
    WorkerLost(time_s=2.375, worker=3, rank=3, step=4),
    WorkerJoined(time_s=2.4375, worker=3, rank=3),
    Notice(time_s=2.5, text="zwölf «NaN»\nand a second line"),
    RunEnded(time_s=3.0, outcome="done", result={"test_top1": 0.875, "staleness": {"mean": 0.5}}),
]


def logged(path, events):
    log = EventLog(path)
    for event in events:
        log.on_event(event)
    log.close()
    return path


def test_every_kind_of_event_reads_back_as_it_was(tmp_path):
    assert read_events(logged(tmp_path / "events.jsonl", EVERY_KIND)) == EVERY_KIND


def test_a_file_name_that_is_no_utf_8_is_kept(tmp_path):
    notice = Notice(time_s=0.0, text="1 file is left out: caf\udce9.png")
    path = logged(tmp_path / "events.jsonl", [notice])
    assert b"caf\\udce9.png" in path.read_bytes()
    assert read_events(path) == [notice]


def test_a_line_is_on_disk_before_the_next_event(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.on_event(STARTED)
    assert read_events(tmp_path / "events.jsonl") == [STARTED]
    log.close()


def test_numbers_that_are_not_finite_are_valid_json_and_come_back(tmp_path):
    worked = WorkerProgress(
        time_s=1.0, worker=0, epoch=0, step=1, steps=1, images=8, loss=math.inf, learning_rate=-math.inf
    )
    ended = RunEnded(
        time_s=2.0, outcome="failed", result={"train_loss": math.nan, "deep": {"list": [math.inf]}}
    )
    path = logged(tmp_path / "events.jsonl", [worked, ended, Notice(time_s=2.0, text="NaN")])

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    records = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert records[0]["loss"] == "Infinity"
    assert records[0]["learning_rate"] == "-Infinity"
    again, end, notice = read_events(path)
    assert again == worked
    assert math.isnan(end.result["train_loss"])
    assert end.result["deep"] == {"list": [math.inf]}
    assert notice.text == "NaN"


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_cut_last_line_is_left_out(tmp_path, kept):
    path = logged(tmp_path / "events.jsonl", [STARTED, WORKED])
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:kept])
    assert read_events(path) == [STARTED]


def test_a_resumed_run_appends_after_a_cut_line(tmp_path):
    path = logged(tmp_path / "events.jsonl", [STARTED, WORKED])
    path.write_bytes(path.read_bytes()[:-5])
    logged(path, EVERY_KIND[2:4])
    assert read_events(path) == [STARTED, *EVERY_KIND[2:4]]


@pytest.mark.parametrize(
    "damage", [b'{"event": "WorkerProg', b"[1, 2]", b'{"event": "Party", "time_s": 1}', b"\xff\xfe", b""]
)
def test_a_damaged_line_in_the_middle_is_named(tmp_path, damage):
    path = logged(tmp_path / "events.jsonl", EVERY_KIND[:3])
    lines = path.read_bytes().split(b"\n")
    lines[1] = damage
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(RequestError, match=r"events\.jsonl: line 2 is damaged .*delete that line") as raised:
        read_events(path)
    assert "\n" not in str(raised.value)


def test_a_missing_log_is_a_wrong_request(tmp_path):
    with pytest.raises(RequestError, match=r"cannot read .*nowhere.*give the folder of a run"):
        read_events(tmp_path / "nowhere" / "events.jsonl")


def test_a_long_log_reads_as_its_lines_do_and_a_damaged_line_in_it_is_named(tmp_path):
    """Lines are parsed many at a time: that holds for infinities and for lines that make one together, too."""
    every = [replace(WORKED, step=step, loss=math.inf if step == 1500 else 0.5) for step in range(2500)]
    path = logged(tmp_path / "events.jsonl", every)
    assert read_events(path) == every
    lines = path.read_bytes().split(b"\n")
    cut = lines[1200].index(b"learning_rate")
    torn = [*lines[:1200], lines[1200][:cut], lines[1200][cut:], *lines[1201:]]
    path.write_bytes(b"\n".join(torn))
    with pytest.raises(RequestError, match="line 1201 is damaged"):
        read_events(path)
    doubled = [
        *lines[:1200],
        lines[1200] + b"," + lines[1201],
        b'{"event": "Notice", "time_s": 1',
        b'"text": ""}',
        *lines[1202:],
    ]
    path.write_bytes(b"\n".join(doubled))
    with pytest.raises(RequestError, match="line 1201 is damaged"):
        read_events(path)

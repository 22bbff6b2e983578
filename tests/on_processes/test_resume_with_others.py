"""A real run that was asked to stop in the middle of an epoch goes on with another number of workers."""

from __future__ import annotations

from pathlib import Path

from on_processes.brake import Brake
from on_processes.commands import shell
from on_processes.runs import runs
from polyrhythm.events import Event, RunStarted, WorkerProgress
from polyrhythm.reporting.event_log import read_events

COMMAND = [
    *(
        "train",
        "--data",
        "digits",
        "--model",
        "mlp",
        "--batch-size",
        "1",
        "--epochs",
        "2",
        "--workers",
        "2",
    ),
    *("--strategy", "parameter_server(servers=2)", "--optimizer", "sgd(lr=0.001, momentum=0.9)"),
    *("--batches", "static"),
]


def under_way(event: Event) -> bool:
    return isinstance(event, WorkerProgress)


def test_what_is_left_of_the_epoch_is_shared_by_three(tmp_path: Path) -> None:
    with runs(tmp_path, *COMMAND, brake=Brake(tmp_path / "brake", 100)) as start:
        command = start()
        command.wait_for(under_way)
        command.process.terminate()
        assert command.result().status == 130
    (resumed,) = shell(tmp_path, ["train", "--resume", "run", "--workers", "3", "--json"])
    assert "notice: resumed with 3 workers in place of 2: the servers continue" in resumed.err
    figures = resumed.figures
    assert (figures["workers"], figures["epochs"], figures["images_not_seen"]) == (3, 2, 0)
    started = [
        event for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, RunStarted)
    ]
    before, after = started
    assert before.begun == {}
    taken = sum(sum(steps) for stretches in after.begun["epochs"].values() for steps in stretches)
    images = before.steps_per_epoch * 2  # one a step, and the number of images is even
    first = min(map(int, after.begun["epochs"]))
    gradients = sum(figures["staleness"]["histogram"].values())
    assert 0 < taken < 2 * images
    assert gradients == 2 * 2 * images  # each image of both epochs once, on both shards
    assert after.start_epoch == first

"""Workers that draw their batches: each image once, whoever of the processes is killed, and with other workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from on_processes.brake import Brake
from on_processes.commands import shell, wait_for
from on_processes.runs import places_held, runs
from polyrhythm.events import BatchesDrawn, Event, RunStarted, WorkerProgress
from polyrhythm.reporting.event_log import read_events

EPOCHS, IMAGES, WORKERS = 3, 1438, 3
TRAIN = [
    *("train", "--data", "digits", "--model", "mlp", "--json", "--strategy", "parameter_server(servers=2)"),
    *("--optimizer", "sgd(lr=0.001, momentum=0.9)", "--batch-size", "1", "--epochs", str(EPOCHS)),
]


def under_way(event: Event) -> bool:
    return isinstance(event, WorkerProgress) and event.worker == 1


def test_others_draw_what_a_killed_worker_has_not_done(tmp_path: Path) -> None:
    words = [*TRAIN, "--workers", str(WORKERS), "--restarts", "0"]
    with runs(tmp_path, *words, brake=Brake(tmp_path / "brake", 200)) as start:
        command = start()
        command.wait_for(under_way)
        pids = wait_for(lambda: len(found := command.children()) == WORKERS + 2 and found, "all ranks")
        os.kill(pids[1], signal.SIGKILL)
        command.go_on()
        figures = command.result().figures
    assert (figures["workers_lost"], figures["images_not_seen"], figures["epochs"]) == (1, 0, EPOCHS)
    # Batches of one image: a gradient each, on both shards; of the killed one's last, one server may have had it.
    gradients = sum(figures["staleness"]["histogram"].values())
    assert EPOCHS * IMAGES * 2 <= gradients <= EPOCHS * IMAGES * 2 + 1
    given_back = [event for event in read_events(tmp_path / "run" / "events.jsonl") if _is_given_back(event)]
    assert 1 <= len(given_back) <= 2  # it asks for more when it begins the last batch that it has
    assert {event.unit for event in given_back} == {1}
    everything = ((epoch, place) for epoch in range(EPOCHS) for place in range(IMAGES))
    assert places_held(tmp_path / "run") == dict.fromkeys(everything, 1)


def _is_given_back(event: Event) -> bool:
    return isinstance(event, BatchesDrawn) and not event.batches


def test_what_is_left_is_drawn_by_three_in_place_of_two(tmp_path: Path) -> None:
    with runs(tmp_path, *TRAIN, "--workers", "2", brake=Brake(tmp_path / "brake", 100)) as start:
        command = start()
        command.wait_for(under_way)
        command.process.terminate()
        assert command.result().status == 130
    (resumed,) = shell(tmp_path, ["train", "--resume", "run", "--workers", "3", "--json"])
    figures = resumed.figures
    assert (figures["workers"], figures["epochs"], figures["images_not_seen"]) == (3, EPOCHS, 0)
    assert sum(figures["staleness"]["histogram"].values()) == EPOCHS * IMAGES * 2
    events = read_events(tmp_path / "run" / "events.jsonl")
    before, after = (event for event in events if isinstance(event, RunStarted))
    left = sum(stop - start for ranges in after.deal["free"] for start, stop in ranges)
    assert 0 < left < EPOCHS * IMAGES == sum(stop - start for ((start, stop),) in before.deal["free"])

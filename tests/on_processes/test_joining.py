"""Workers that join a running job by hand, and leave it again: processes of their own, through the join server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from on_processes.brake import Brake
from on_processes.commands import Started, shell, wait_for
from on_processes.guest import Guest
from on_processes.runs import ending, places_held
from on_processes.verb import POLYRHYTHM
from polyrhythm.events import Event, Notice, WorkerJoined, WorkerProgress
from polyrhythm.reporting.event_log import read_events

EPOCHS = 10
TRAIN = [
    *(
        "train",
        "--data",
        "digits",
        "--model",
        "mlp",
        "--json",
        "--batch-size",
        "8",
        "--listen",
        "0",
    ),
    *("--workers", "3", "--vacant", "1", "--restarts", "0", "--epochs", str(EPOCHS), "--out", "run"),
    *("--silence-s", "60"),
]
STEPS, IMAGES = EPOCHS * 60, 1438


@pytest.fixture
def brake(tmp_path: Path) -> Brake:
    return Brake(tmp_path / "brake", 5)


@pytest.fixture
def start(tmp_path: Path, brake: Brake) -> Iterator[Callable[..., Started]]:
    with ending() as started:

        def run(strategy: str, batches: str = "static") -> Started:
            words = [POLYRHYTHM, *TRAIN, "--strategy", strategy, "--batches", batches]
            started.append(Started(words, tmp_path, tmp_path / "run", brake=brake))
            started[-1].wait_for(lambda event: isinstance(event, WorkerProgress))
            return started[-1]

        yield run


@pytest.fixture
def join(tmp_path: Path, brake: Brake) -> Iterator[Callable[[str], Guest]]:
    with ending() as guests:

        def come(name: str) -> Guest:
            guest = Guest(tmp_path, name, tmp_path / "run" / "join-token", brake=brake)
            guests.append(guest.command)
            wait_for(guest.has_a_place, "a place")
            return guest

        yield come


def guests_steps(event: Event) -> bool:
    return isinstance(event, WorkerProgress) and event.worker == 2


def notices(run: Path) -> list[str]:
    return [event.text for event in read_events(run / "events.jsonl") if isinstance(event, Notice)]


def have_joined(command: Started, count: int) -> bool:
    events = read_events(command.run / "events.jsonl")
    return sum(isinstance(event, WorkerJoined) for event in events) == count


@pytest.mark.parametrize("batches", ["static", "dynamic"])
def test_a_worker_joins_leaves_when_it_is_preempted_and_another_takes_its_place(
    start: Callable[..., Started], join: Callable[[str], Guest], brake: Brake, batches: str
) -> None:
    command = start("parameter_server", batches)
    first = join("first")
    command.wait_for(guests_steps)
    first.command.process.terminate()
    left = first.result()
    assert left.status == os.EX_TEMPFAIL, left.err
    second = join("second")
    wait_for(lambda: have_joined(command, 2), "the second to be let in")
    brake.release()
    figures = command.result().figures
    done = second.result()
    assert done.status == 0, done.err
    assert done.err.splitlines()[-1] == "done: all its steps are taken"
    assert (figures["workers_lost"], figures["workers_joined"]) == (2, 2)
    assert figures["images_not_seen"] == 0
    # no gradient of anybody is lost, or applied twice
    gradients = sum(figures["staleness"]["histogram"].values())
    if batches == "static":
        assert (figures["steps"], gradients) == (STEPS, 3 * STEPS)
    else:
        everything = ((epoch, place) for epoch in range(EPOCHS) for place in range(IMAGES))
        assert places_held(command.run) == dict.fromkeys(everything, 1)
        assert gradients >= EPOCHS * IMAGES / 8
    said = notices(command.run)
    assert any(text.endswith("left: its host asked it to; its place is vacant") for text in said), said
    assert not (command.run / "join.json").exists()
    assert not (command.run / "join-token").exists()


def test_a_worker_joins_those_who_go_in_step_and_a_stranger_does_not(
    start: Callable[..., Started], join: Callable[[str], Guest], brake: Brake, tmp_path: Path
) -> None:
    command = start("synchronous")
    guest = join("guest")
    address = guest.address
    (tmp_path / "wrong").write_text("not the token of this run")
    (tmp_path / "wrong").chmod(0o600)
    (refused,) = shell(tmp_path, ["join", address, "--token-file", "wrong"])
    wait_for(lambda: have_joined(command, 1), "the guest to be let in")
    brake.release()
    assert refused.status == 2
    assert refused.complaint == f"the run at {address} has another token: give its own"
    figures = command.result().figures
    assert guest.result().status == 0
    assert (figures["workers_lost"], figures["workers_joined"]) == (1, 1)
    assert (figures["steps"], figures["images_not_seen"]) == (STEPS, 0)
    assert figures["test_top1"] > 0.9
    told = [text for text in notices(command.run) if text.startswith("the join server refused")]
    assert len(told) == 2
    assert told[0].endswith(" (token): it does not know the token")
    assert told[1] == "the join server refused 1 visitor: 1 token"

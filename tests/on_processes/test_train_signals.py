"""Runs that are asked to stop, and runs whose processes are killed."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from on_processes.commands import Started, shell, wait_for
from on_processes.runs import ending
from on_processes.verb import POLYRHYTHM
from polyrhythm.events import CheckpointSaved, Event, Notice, RunEnded, RunStarted, WorkerProgress
from polyrhythm.reporting.event_log import read_events
from polyrhythm.training.checkpoint import checkpoints
from processes.family import are_gone, is_pending, stop

Starter = Callable[..., tuple[Started, list[int]]]
STEPS_PER_EPOCH = 240
ENDLESS = [  # so that it is going on whenever the signal comes; at a rate that does not depend on the number of epochs
    # On a busy machine an epoch takes so long that `--balance auto` would measure shares, which no other run has.
    *("train", "--data", "digits", "--model", "lenet5(widths=[4, 8], hidden=16, dropout=0.5)", "--json"),
    *("--optimizer", "sgd(lr=0.01, momentum=0.9)", "--schedule", "constant", "--batch-size", "3"),
    *("--epochs", "100000", "--balance", "off"),
]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Starts a run without an end; nothing of it outlives the test."""
    with ending() as started:

        def run(*options: str) -> tuple[Started, list[int]]:
            command = Started([POLYRHYTHM, *ENDLESS, "--out", "run", *options], tmp_path, tmp_path / "run")
            started.append(command)
            command.wait_for(in_the_second_epoch)
            return command, command.children()

        yield run


def in_the_second_epoch(event: Event) -> bool:
    return isinstance(event, WorkerProgress) and event.epoch == 1


def resume_for(epochs: int) -> list[str]:
    return ["train", "--resume", "run", "--epochs", str(epochs), "--json"]


def test_after_an_interrupt_the_run_goes_on_as_if_nothing_had_been(start: Starter, tmp_path: Path) -> None:
    command, ranks = start()
    os.killpg(command.process.pid, signal.SIGINT)  # as a terminal does
    result = command.result()
    assert result.status == 130
    assert result.out == ""
    assert result.err.splitlines()[-1] == "interrupted; continue with: polyrhythm train --resume run"
    assert are_gone(ranks)
    *_, saved, end = read_events(command.run / "events.jsonl")
    assert isinstance(end, RunEnded)
    assert end.outcome == "interrupted"
    assert isinstance(saved, CheckpointSaved)
    assert saved.step > STEPS_PER_EPOCH
    epochs = saved.step // STEPS_PER_EPOCH + 2
    whole_run = [*ENDLESS, "--epochs", str(epochs), "--out", "whole"]
    resumed, whole = shell(tmp_path, resume_for(epochs), whole_run)
    assert resumed.figures["parameters_sha256"] == whole.figures["parameters_sha256"]
    assert resumed.figures["test_loss"] == whole.figures["test_loss"]
    assert resumed.figures["steps"] == epochs * STEPS_PER_EPOCH


def test_sigterm_to_the_launcher_stops_an_asynchronous_run(start: Starter, tmp_path: Path) -> None:
    command, ranks = start("--strategy", "parameter_server(servers=2)")
    assert len(ranks) == 4
    command.process.terminate()
    result = command.result()
    assert result.status == 130
    assert "continue with: polyrhythm train --resume run" in result.err
    assert are_gone(ranks)
    end = read_events(command.run / "events.jsonl")[-1]
    assert isinstance(end, RunEnded)
    epochs = (
        sum(end.result["staleness"]["histogram"].values()) // (2 * STEPS_PER_EPOCH) + 1
    )  # more than any has begun
    (resumed,) = shell(tmp_path, resume_for(epochs))
    assert resumed.figures["epochs"] == epochs
    # no gradient is lost or counted twice: every step of both workers was applied to both shards
    assert sum(resumed.figures["staleness"]["histogram"].values()) == 4 * epochs * STEPS_PER_EPOCH


def test_a_terminal_that_is_gone_stops_a_run_with_a_checkpoint(start: Starter) -> None:
    command, ranks = start("--strategy", "parameter_server")
    os.killpg(command.process.pid, signal.SIGHUP)  # as the kernel does, to all of its processes
    result = command.result()
    assert result.status == 130
    assert result.err.splitlines()[-1] == "interrupted; continue with: polyrhythm train --resume run"
    assert are_gone(ranks)
    events = read_events(command.run / "events.jsonl")
    last = events[-1]
    assert isinstance(last, RunEnded)
    assert last.outcome == "interrupted"
    saved = [event for event in events if isinstance(event, CheckpointSaved)][-1]
    assert saved.epoch >= 1
    assert saved.step <= last.result["steps"]  # of worker 0, which may be behind the other


def test_a_second_interrupt_ends_at_once(start: Starter) -> None:
    command, ranks = start("--silence-s", "600")
    stop(ranks[1])  # and so it will never leave by itself
    os.killpg(command.process.pid, signal.SIGINT)
    wait_for(lambda: is_pending(ranks[1], signal.SIGTERM), "the launcher to pass the wish on")
    assert command.process.poll() is None
    os.killpg(command.process.pid, signal.SIGINT)
    result = command.result()
    assert result.status == 130
    assert result.err.splitlines()[-1] == "interrupted"
    assert are_gone(ranks)


@pytest.mark.parametrize(
    ("strategy", "rank", "name"),
    [
        ("synchronous", 0, "worker 0 (rank 0)"),
        ("hybrid", 1, "worker 1 (rank 1)"),
        ("mixed(replicas=2)", 2, "server 0 (rank 2)"),
    ],
)
def test_a_killed_rank_is_named(strategy: str, rank: int, name: str, start: Starter) -> None:
    command, ranks = start("--strategy", strategy, "--restarts", "0")
    os.kill(ranks[rank], signal.SIGKILL)
    result = command.result()
    assert result.status == 1
    assert result.complaint == f"{name} was killed by SIGKILL; continue with --resume run"
    assert are_gone(ranks)
    end = read_events(command.run / "events.jsonl")[-1]
    assert isinstance(end, RunEnded)
    assert end.outcome == "failed"


def test_ranks_do_not_outlive_a_launcher_that_was_killed(start: Starter) -> None:
    command, ranks = start("--strategy", "mixed(replicas=2)")
    command.process.kill()
    command.process.wait()
    wait_for(lambda: are_gone(ranks), "the ranks to leave")
    assert are_gone(ranks)


def removed_with_all_in_it(folder: Path) -> None:
    """Remove a folder into which a run may just be writing, which makes the first try fail now and then."""
    for _ in range(100):
        try:
            shutil.rmtree(folder)
        except OSError:
            continue
        return
    raise AssertionError(f"{folder} is still there")


@pytest.mark.parametrize("how", ["deleted", "checkpoints deleted"])
def test_a_folder_that_vanishes_under_a_run_is_made_again(how: str, start: Starter, tmp_path: Path) -> None:
    command, _ = start()
    removed_with_all_in_it(command.run / "checkpoints" if "checkpoints" in how else command.run)
    wait_for(
        lambda: (command.run / "checkpoints").is_dir() and checkpoints(command.run / "checkpoints"), "one"
    )
    if "checkpoints" not in how:
        command.wait_for(lambda event: isinstance(event, Notice) and "it is created again" in event.text)
    command.process.terminate()
    assert command.result().status == 130
    events = read_events(command.run / "events.jsonl")
    assert isinstance(events[0], RunStarted)
    assert isinstance(events[-1], RunEnded)
    saved = [event for event in events if isinstance(event, CheckpointSaved)][-1]
    assert (command.run / "report.html").is_file()
    epochs = saved.step // STEPS_PER_EPOCH + 1
    (resumed,) = shell(tmp_path, resume_for(epochs))
    assert resumed.figures["epochs"] == epochs

"""Runs that are asked to stop, and runs whose processes are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from multiprocess.commands import Started, shell, wait_for
from multiprocess.runs import ending
from multiprocess.verb import POLYRHYTHM
from polyrhythm.events import CheckpointSaved, Event, RunEnded, WorkerProgress
from polyrhythm.reporting.event_log import read_events
from processes.family import are_gone, is_pending

Starter = Callable[..., tuple[Started, list[int]]]
EPOCHS = 3
STEPS_PER_EPOCH = 240
LONG = [
    *("train", "--data", "digits", "--model", "lenet5(widths=[4, 8], hidden=16, dropout=0.5)", "--json"),
    *("--optimizer", "sgd(lr=0.01, momentum=0.9)", "--batch-size", "3", "--epochs", str(EPOCHS)),
]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Starts a long run; nothing of it outlives the test."""
    with ending() as started:

        def run(*options: str) -> tuple[Started, list[int]]:
            command = Started([POLYRHYTHM, *LONG, "--out", "run", *options], tmp_path, tmp_path / "run")
            started.append(command)
            command.wait_for(in_the_second_epoch)
            return command, command.children()

        yield run


def in_the_second_epoch(event: Event) -> bool:
    return isinstance(event, WorkerProgress) and event.epoch == 1


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
    assert STEPS_PER_EPOCH < saved.step < EPOCHS * STEPS_PER_EPOCH
    resumed, whole = shell(tmp_path, ["train", "--resume", "run", "--json"], [*LONG, "--out", "whole"])
    assert resumed.figures["parameters_sha256"] == whole.figures["parameters_sha256"]
    assert resumed.figures["test_loss"] == whole.figures["test_loss"]
    assert resumed.figures["steps"] == EPOCHS * STEPS_PER_EPOCH


def test_sigterm_to_the_launcher_stops_an_asynchronous_run(start: Starter, tmp_path: Path) -> None:
    command, ranks = start("--strategy", "parameter_server(servers=2)")
    assert len(ranks) == 4
    command.process.terminate()
    result = command.result()
    assert result.status == 130
    assert "continue with: polyrhythm train --resume run" in result.err
    assert are_gone(ranks)
    (resumed,) = shell(tmp_path, ["train", "--resume", "run", "--json"])
    assert resumed.figures["epochs"] == EPOCHS
    # no gradient is lost or counted twice: every step of both workers was applied to both shards
    assert sum(resumed.figures["staleness"]["histogram"].values()) == 4 * EPOCHS * STEPS_PER_EPOCH


def test_a_second_interrupt_ends_at_once(start: Starter) -> None:
    command, ranks = start()
    os.kill(ranks[1], signal.SIGSTOP)  # and so it will never stop by itself
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

"""Servers of real processes that are killed: where every shard is on two of them, and where it is not."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from on_processes.brake import Brake
from on_processes.commands import Started, wait_for
from on_processes.runs import Starter, runs
from polyrhythm.events import (
    CheckpointSaved,
    Event,
    Notice,
    Restarted,
    ServerJoined,
    WorkerJoined,
    WorkerProgress,
)
from polyrhythm.reporting.event_log import read_events
from processes.family import stopped

EPOCHS, BATCH_SIZE, IMAGES, WORKERS, SERVERS = 6, 4, 1438, 3, 2
LENGTH = -(-IMAGES // (BATCH_SIZE * WORKERS))
STEPS, SLOW_FROM = EPOCHS * LENGTH, 2 * LENGTH
"""Workers take their time when they have told of their second epoch, until what is to happen to them has."""
TRAIN = [
    *("train", "--data", "digits", "--model", "mlp", "--json", "--optimizer", "sgd(lr=0.04)"),
    *("--batch-size", str(BATCH_SIZE), "--epochs", str(EPOCHS), "--workers", str(WORKERS)),
]
ON_TWO = f"parameter_server(servers={SERVERS}, replicas=2)"
GOING_ON_S = 30.0
"""Half of what a link waits by itself; it takes a step."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    with runs(tmp_path, *TRAIN, brake=Brake(tmp_path / "brake", SLOW_FROM)) as starter:
        yield starter


def ranks_of(command: Started) -> list[int]:
    return wait_for(
        lambda: (found := command.children()) and len(found) == WORKERS + SERVERS and found, "all ranks"
    )


def in_epoch(epoch: int, worker: int = 1) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, WorkerProgress) and (event.epoch, event.worker) == (epoch, worker)


def steps_of(command: Started, worker: int) -> int:
    """Gives the steps that a worker was last heard to have done."""
    events = read_events(command.run / "events.jsonl")
    done = [event.step for event in events if isinstance(event, WorkerProgress) and event.worker == worker]
    return max(done, default=0)


def count_of(command: Started, kind: type[Event]) -> int:
    return sum(isinstance(event, kind) for event in read_events(command.run / "events.jsonl"))


@pytest.mark.parametrize("strategy", [ON_TWO, f"downpour(servers={SERVERS}, replicas=2)"])
def test_a_killed_server_is_done_without_and_nothing_is_lost(start: Starter, strategy: str) -> None:
    command = start("--strategy", strategy, "--restarts", "0")
    command.wait_for(in_epoch(1))
    os.kill(ranks_of(command)[WORKERS], signal.SIGKILL)
    killed_at_s, before = time.monotonic(), [steps_of(command, worker) for worker in range(WORKERS)]
    for worker in range(WORKERS):
        wait_for(lambda: steps_of(command, worker) > before[worker], "the workers to continue")  # noqa: B023
    assert time.monotonic() - killed_at_s < GOING_ON_S
    command.go_on()
    result = command.result()
    figures = result.figures
    assert result.status == 0
    assert (figures["servers_lost"], figures["servers_joined"]) == (1, 0)
    assert (figures["workers_lost"], figures["images_not_seen"]) == (0, 0)
    assert sum(figures["staleness"]["histogram"].values()) == SERVERS * WORKERS * STEPS
    assert figures["messages_refused"] == {}
    assert figures["test_top1"] > 0.85
    notices = [event.text for event in read_events(command.run / "events.jsonl") if isinstance(event, Notice)]
    assert (
        "server 0 (rank 3) was killed by SIGKILL; another server with its shards continues with them"
        in notices
    )


@pytest.mark.parametrize("strategy", [ON_TWO, f"downpour(servers={SERVERS}, replicas=2)"])
def test_a_killed_server_is_started_again_and_then_the_other_may_be_lost(
    start: Starter, strategy: str
) -> None:
    command = start("--strategy", strategy)
    command.wait_for(in_epoch(1))
    # Server 0, server 1, and the successor of server 0: a successor is the last process.
    for joined in range(3):
        ranks = ranks_of(command)
        with stopped(ranks[1:WORKERS]):  # they hear of it all at once
            os.kill(ranks[WORKERS], signal.SIGKILL)
            wait_for(lambda: count_of(command, ServerJoined) > joined, "the successor to have its shards")  # noqa: B023
    command.go_on()
    result = command.result()
    figures = result.figures
    assert result.status == 0
    assert (figures["servers_lost"], figures["servers_joined"]) == (3, 3)
    assert (figures["workers_lost"], figures["images_not_seen"], figures["restarts"]) == (0, 0, 0)
    assert sum(figures["staleness"]["histogram"].values()) == SERVERS * WORKERS * STEPS
    assert figures["messages_refused"] == {}
    assert figures["test_top1"] > 0.85
    notices = [event.text for event in read_events(command.run / "events.jsonl") if isinstance(event, Notice)]
    assert "server 0 (rank 3) is there again, and has its shards from its neighbors" in notices
    assert any(
        text.endswith("continues with them, and it is started again in 0.5 s (restart 1 of 3)")
        for text in notices
    )


def test_a_worker_that_comes_after_a_server_was_lost_finds_the_other(start: Starter) -> None:
    command = start("--strategy", ON_TWO)
    command.wait_for(in_epoch(1))
    ranks = ranks_of(command)
    os.kill(ranks[WORKERS + 1], signal.SIGKILL)
    command.wait_for(lambda event: isinstance(event, Notice) and "server 1 (rank 4) was killed" in event.text)
    os.kill(ranks[1], signal.SIGKILL)
    command.wait_for(lambda event: isinstance(event, WorkerJoined))
    command.go_on()
    figures = command.result().figures
    assert (figures["servers_lost"], figures["workers_lost"], figures["workers_joined"]) == (1, 1, 1)
    assert figures["images_not_seen"] == 0
    assert sum(figures["staleness"]["histogram"].values()) == SERVERS * WORKERS * STEPS


def test_without_a_replica_the_run_is_started_again_from_its_last_checkpoint(start: Starter) -> None:
    command = start("--strategy", "parameter_server(servers=2)", "--epochs", "3")
    command.wait_for(lambda event: isinstance(event, CheckpointSaved))
    os.kill(ranks_of(command)[WORKERS], signal.SIGKILL)
    command.go_on()
    result = command.result()
    figures = result.figures
    (again,) = [event for event in read_events(command.run / "events.jsonl") if isinstance(event, Restarted)]
    assert result.status == 0
    assert re.match(
        r"server 0 \(rank 3\) was killed by SIGKILL; the run is started again \(restart 1 of 3\) from its last "
        rf"checkpoint, epoch \d, step \d+: {again.updates_lost} updates since then are lost$",
        again.text,
    ), again.text
    assert (figures["restarts"], figures["updates_lost"]) == (1, again.updates_lost)
    assert f"started again 1 time, {again.updates_lost:,} update" in result.err
    assert sum(figures["staleness"]["histogram"].values()) == SERVERS * WORKERS * STEPS // 2
    assert figures["test_top1"] > 0.85

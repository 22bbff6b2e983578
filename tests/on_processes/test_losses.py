"""Asynchronous runs whose workers are killed go on without them, or with their successors."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from on_processes.brake import Brake
from on_processes.commands import Result, Started, shell, wait_for
from on_processes.runs import Starter, ending, runs
from on_processes.verb import POLYRHYTHM
from polyrhythm.api.replay import replay
from polyrhythm.data.dealing import batch_indices
from polyrhythm.errors import RequestError
from polyrhythm.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    Notice,
    RunEnded,
    RunStarted,
    WorkerJoined,
    WorkerLost,
    WorkerProgress,
)
from polyrhythm.reporting.event_log import read_events
from processes.family import stopped
from processes.ports import free_port

EPOCHS, BATCH_SIZE, IMAGES, WORKERS = 6, 4, 1438, 3
LENGTH = -(-IMAGES // (BATCH_SIZE * WORKERS))
STEPS, SLOW_FROM = EPOCHS * LENGTH, 2 * LENGTH
"""Workers take their time when they have told of their second epoch, until what is to happen to them has."""

TRAIN = [
    *("train", "--data", "digits", "--model", "mlp", "--json", "--strategy", "parameter_server(servers=2)"),
    *("--optimizer", "sgd(lr=0.04)", "--batch-size", str(BATCH_SIZE), "--epochs", str(EPOCHS)),
    *("--workers", str(WORKERS), "--batches", "static"),
]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    with runs(tmp_path, *TRAIN, brake=Brake(tmp_path / "brake", SLOW_FROM)) as starter:
        yield starter


def kill(command: Started, rank: int, servers: int = 2) -> int:
    """Kills a rank of a run in which nobody has died before."""
    pids = wait_for(
        lambda: (found := command.children()) and len(found) == WORKERS + servers and found, "all ranks"
    )
    os.kill(pids[rank], signal.SIGKILL)
    return pids[rank]


def kill_until_a_successor_starts(command: Started, rank: int, servers: int = 2) -> None:
    """Stops the leader meanwhile, as anything might that it does for long."""
    leader, *others = command.children()
    with stopped([leader]):
        kill(command, rank, servers)
        wait_for(lambda: set(command.children()) - {leader, *others}, "the successor to start")
    command.wait_for(lambda event: isinstance(event, WorkerJoined))
    command.go_on()


def in_epoch(epoch: int, worker: int = 1) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, WorkerProgress) and (event.epoch, event.worker) == (epoch, worker)


def of(kind: type[Event], command: Started) -> list[Event]:
    return [event for event in read_events(command.run / "events.jsonl") if isinstance(event, kind)]


def notices(command: Started) -> list[str]:
    return [event.text for event in of(Notice, command) if isinstance(event, Notice)]


def gradients(result: Result) -> float:
    """Counts those that were applied: a shard each, so half of what the servers have counted."""
    return sum(result.figures["staleness"]["histogram"].values()) / 2


def images_after(step: int, worker: int) -> int:
    """Counts the images of a worker's steps from one on, as its loader deals them out."""
    return sum(
        len(batch_indices(torch.arange(IMAGES), number % LENGTH, worker, WORKERS, BATCH_SIZE))
        for number in range(step, STEPS)
    )


def test_the_others_go_on_without_a_killed_worker(start: Starter) -> None:
    command = start("--restarts", "0")
    command.wait_for(in_epoch(1))
    kill(command, 1)
    command.go_on()
    result = command.result()
    figures = result.figures
    assert (figures["workers_lost"], figures["workers_joined"]) == (1, 0)
    assert figures["test_top1"] > 0.85
    done = gradients(result) - 2 * STEPS  # all of the others' steps were applied, and some of the lost one's
    assert 0 < done < STEPS
    assert figures["images_not_seen"] == images_after(int(done), worker=1)
    (lost,) = of(WorkerLost, command)
    assert isinstance(lost, WorkerLost)
    assert (lost.worker, lost.rank) == (1, 1)
    assert lost.step <= done
    (death,) = [text for text in notices(command) if "was killed" in text]
    assert death == "worker 1 (rank 1) was killed by SIGKILL; the others continue"
    assert f"notice: {death}\n" in result.err
    assert f"notice: {lost.text}\n" in result.err
    assert "Training images not seen" in (command.run / "report.html").read_text()
    with pytest.raises(RequestError, match="lost 1 of its workers: the times"):
        replay(command.run)


def test_a_successor_takes_the_steps_that_are_left(start: Starter) -> None:
    command = start()
    command.wait_for(in_epoch(1, worker=0))
    kill_until_a_successor_starts(command, 1)
    result = command.result()
    figures = result.figures
    assert (figures["workers_lost"], figures["workers_joined"], figures["images_not_seen"]) == (1, 1, 0)
    assert figures["test_top1"] > 0.85
    assert gradients(result) == 3 * STEPS  # no step is lost or counted twice, on any shard
    (joined,) = of(WorkerJoined, command)
    done = [
        event.step
        for event in of(WorkerProgress, command)
        if isinstance(event, WorkerProgress) and event.worker == 1 and event.time_s > joined.time_s
    ]
    assert done == sorted(done)
    # A leader that stands still for seconds, as this test has it, is spoken of as well.
    (death,) = [text for text in notices(command) if "was killed" in text]
    assert death.endswith("the others continue, and it is started again in 0.5 s (restart 1 of 3)")


def test_lock_step_with_two_servers_goes_on(start: Starter) -> None:
    spec = "parameter_server(servers=2, consistency=synchronous)"
    command = start("--strategy", spec)
    command.wait_for(in_epoch(1))
    kill_until_a_successor_starts(command, 1)
    result = command.result()
    figures = result.figures
    assert (figures["workers_lost"], figures["workers_joined"], figures["images_not_seen"]) == (1, 1, 0)
    assert gradients(result) == 3 * STEPS
    assert figures["test_top1"] > 0.85


def test_a_worker_that_dies_at_the_start_has_a_successor(start: Starter) -> None:
    command = start()
    kill(command, 2)  # before anybody has trained
    command.wait_for(in_epoch(0, worker=2))
    command.go_on()
    result = command.result()
    assert len(of(RunStarted, command)) == 1
    assert result.figures["test_top1"] > 0.85
    assert gradients(result) == 3 * STEPS
    assert result.figures["images_not_seen"] == 0


def test_with_too_few_workers_a_run_ends_and_can_be_resumed(start: Starter) -> None:
    command = start("--restarts", "0", "--min-workers", "3")
    command.wait_for(in_epoch(1))
    kill(command, 1)
    command.go_on()
    result = command.result()
    assert result.status == 1
    assert result.complaint == (
        "worker 0 (rank 0): 2 of 3 workers remain, and min_workers is 3; continue with --resume run"
    )
    *told, end = read_events(command.run / "events.jsonl")
    kinds = [type(event) for event in told]
    assert CheckpointSaved in kinds[kinds.index(WorkerLost) :]
    assert isinstance(end, RunEnded)
    assert end.outcome == "failed"
    (resumed,) = shell(command.run.parent, ["train", "--resume", "run", "--json"])
    assert gradients(resumed) == 3 * STEPS
    assert resumed.figures["images_not_seen"] == 0


@pytest.mark.parametrize(
    ("spec", "servers"),
    [
        ("ssp(servers=2)", 2),
        ("parameter_server(servers=2, consistency=synchronous)", 2),
        ("ad_psgd", 0),
        ("hogwild", 0),
    ],
)
def test_a_successor_of_worker_0_takes_up_the_lead(spec: str, servers: int, start: Starter) -> None:
    command = start("--strategy", spec)
    command.wait_for(in_epoch(1))
    kill(command, 0, servers)
    command.go_on()
    result = command.result()
    figures = result.figures
    assert (figures["workers_lost"], figures["workers_joined"], figures["images_not_seen"]) == (1, 1, 0)
    assert (figures["steps"], figures["messages_refused"], figures.get("restarts", 0)) == (STEPS, {}, 0)
    if servers:  # else each worker counts its own, and what it has counted dies with it
        assert gradients(result) == 3 * STEPS
    assert figures["test_top1"] > 0.85
    assert len(of(RunStarted, command)) == len(of(RunEnded, command)) == 1
    assert [event.to_json()["epoch"] for event in of(Evaluated, command)] == [1, 2, 3, 4, 5, 6]
    saved = [event.to_json()["epoch"] for event in of(CheckpointSaved, command)]
    assert saved == sorted(set(saved))
    assert saved[-1] == 6
    assert len(saved) == 6 or any("is skipped there" in text for text in notices(command))  # by a slow disk
    assert [event.to_json()["worker"] for event in of(WorkerLost, command)] == [0]
    (death,) = [text for text in notices(command) if "was killed" in text]
    assert death == (
        "worker 0 (rank 0) was killed by SIGKILL; the others continue, and it is started again in 0.5 s "
        "(restart 1 of 3)"
    )
    lines = (command.run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(set(lines)) == len(lines)
    times_s = [event.time_s for event in of(Evaluated, command)]
    assert times_s == sorted(times_s)


@pytest.mark.parametrize(("rank", "name"), [(0, "worker 0 (rank 0)"), (4, "server 1 (rank 4)")])
def test_without_its_leader_or_a_server_a_run_ends_and_can_be_resumed(
    rank: int, name: str, start: Starter
) -> None:
    command = start("--restarts", "0")
    command.wait_for(in_epoch(1))
    command.wait_for(lambda event: isinstance(event, CheckpointSaved))
    kill(command, rank)
    command.go_on()
    result = command.result()
    assert result.status == 1
    assert result.complaint == f"{name} was killed by SIGKILL; continue with --resume run"
    (resumed,) = shell(command.run.parent, ["train", "--resume", "run", "--json"])
    assert gradients(resumed) == 3 * STEPS


def test_with_a_torchrun_for_each_rank_the_others_go_on(tmp_path: Path) -> None:
    port = free_port()
    options = ["--data", "digits", "--model", "mlp", "--strategy", "parameter_server", "--batch-size", "4"]
    with ending() as commands:  # torchruns wait for each other's for minutes
        commands += [
            Started(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes=3", "--nproc-per-node=1"),
                    *(
                        f"--node-rank={host}",
                        "--master-addr=127.0.0.1",
                        f"--master-port={port}",
                        "--no-python",
                    ),
                    *(POLYRHYTHM, "train", *options, "--epochs", "100000", "--out", "run"),
                ],
                tmp_path,
                tmp_path / f"host{host}",
            )
            for host in range(3)
        ]
        commands[0].run = tmp_path / "run"
        commands[0].wait_for(in_epoch(1))
        (worker,) = commands[1].children()
        os.kill(worker, signal.SIGKILL)
        lost = commands[0].wait_for(lambda event: isinstance(event, WorkerLost))
        commands[0].wait_for(
            lambda event: isinstance(event, WorkerProgress) and event.time_s > lost.time_s + 0.1
        )
        (leader,) = commands[0].children()
        os.kill(leader, signal.SIGTERM)
        end = commands[0].wait_for(lambda event: isinstance(event, RunEnded))
    assert isinstance(end, RunEnded)
    assert end.outcome == "interrupted"
    assert (end.result["workers"], end.result["workers_lost"]) == (2, 1)

"""Gossip over real processes: the bits of the simulation, deaths that nobody waits for, and replays."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path

import pytest

from conformance.jobs import blobs, make_job, result_of, simulated
from on_processes.brake import Brake
from on_processes.commands import Started, shell, wait_for
from on_processes.runs import ending
from on_processes.verb import POLYRHYTHM
from polyrhythm.api.replay import replay
from polyrhythm.events import Event, WorkerJoined, WorkerLost, WorkerProgress
from polyrhythm.launch.children import run_local
from polyrhythm.reporting.event_log import read_events
from polyrhythm.roles.job import FaultTolerance

WORKERS, EPOCHS = 4, 8
TRAIN = [
    *("train", "--data", "digits", "--model", "mlp", "--json", "--strategy", "ad_psgd", "--out", "run"),
    *("--batches", "static"),
    *("--optimizer", "sgd(lr=0.04)", "--batch-size", "4", "--workers", str(WORKERS)),
]


def test_in_step_real_processes_give_the_bits_of_the_simulation() -> None:
    """One forward and one backward neighbor that take turns, pushes that overlap, and the mean at the end."""
    job = make_job("sgp(overlap=True)", 3)
    virtual = simulated(job).result
    events: list[Event] = []
    run_local(job, events.append, threads=1)
    real = result_of(events)
    for figure in ("parameters_sha256", "test_loss", "bytes_sent_per_step", "staleness"):
        assert real[figure] == virtual[figure], figure


def test_the_others_go_on_and_a_successor_takes_the_steps_that_are_left(tmp_path: Path) -> None:
    """Worker 1 asks; its partners answer somebody else until another takes its place."""
    with ending() as commands:
        brake = Brake(tmp_path / "brake", 100)
        words = [POLYRHYTHM, *TRAIN, "--epochs", str(EPOCHS)]
        command = Started(words, tmp_path, tmp_path / "run", brake=brake)
        commands.append(command)
        ranks = wait_for(lambda: len(found := command.children()) == WORKERS and found, "all ranks")
        wait_for(lambda: brake.reached_by(ranks), "all to be under way")
        os.kill(ranks[1], signal.SIGKILL)
        command.wait_for(lambda event: isinstance(event, WorkerJoined))
        brake.release()
        result = command.result()
    figures = result.figures
    assert (figures["workers_lost"], figures["workers_joined"], figures["images_not_seen"]) == (1, 1, 0)
    assert figures["test_top1"] > 0.85
    assert figures["steps"] == EPOCHS * -(-1438 // (4 * WORKERS))
    (lost,) = (event for event in read_events(command.run / "events.jsonl") if isinstance(event, WorkerLost))
    (joined,) = (
        event for event in read_events(command.run / "events.jsonl") if isinstance(event, WorkerJoined)
    )
    assert (lost.worker, joined.worker) == (1, 1)


@pytest.mark.parametrize(
    "spec",
    [
        "d_psgd",
        "sgp(overlap=True)",
        "slowmo(steps=4, base=sgp)",
        "lazy_synchronous",
        "parameter_server(consistency=synchronous)",
    ],
)
def test_workers_in_step_go_on_without_a_killed_one_and_with_its_successor(spec: str) -> None:
    """They report steps after its death, and with its successor, until they are asked to stop."""
    job = make_job(spec, 3, dataset=blobs(train=240), epochs=20_000)
    job = replace(job, fault_tolerance=FaultTolerance(restarts=1))
    events: list[Event] = []

    def signal_rank(rank: int) -> None:
        (process,) = (child for child in active_children() if child.name.endswith(f"rank {rank}"))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)

    def hear(event: Event) -> None:
        events.append(event)
        of = event.worker if isinstance(event, WorkerProgress) and event.steps > 0 else None
        if stages and stages[0](event, of):
            stages.pop(0)
            if len(stages) == 4:
                signal_rank(1)
            elif not stages:
                os.kill(os.getpid(), signal.SIGTERM)

    stages: list[Callable[[Event, int | None], bool]] = [
        lambda event, of: of == 1,
        lambda event, of: isinstance(event, WorkerLost),
        lambda event, of: isinstance(event, WorkerJoined),
        lambda event, of: of == 1,
        lambda event, of: of == 0,
    ]
    run_local(job, hear, threads=1)
    assert not stages
    result = result_of(events)
    assert (result["workers_lost"], result["workers_joined"]) == (1, 1)
    assert events[-1].to_json()["outcome"] == "interrupted"
    assert math.isfinite(result["train_loss"])


def test_a_real_run_in_pairs_is_replayed_to_the_bit(tmp_path: Path) -> None:
    """Who was averaged with whom, and when between two updates, is all in the order of what each keeper took."""
    (done,) = shell(tmp_path, [*TRAIN, "--epochs", "1"])
    assert done.figures["staleness"]["max"] > 0
    found = replay(tmp_path / "run")
    assert found["same"], found["first_difference"]
    assert found["parameters_sha256"]["replayed"] == done.figures["parameters_sha256"]

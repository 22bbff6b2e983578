"""Runs whose hosts are taken away after a notice, and that are started again by the same command."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from on_processes import braked_verb
from on_processes.brake import Brake
from on_processes.commands import Started, shell
from on_processes.runs import Starter, ending, runs
from polyrhythm.events import CheckpointSaved, Event, WorkerProgress
from polyrhythm.reporting.event_log import read_events
from processes.family import are_gone

TRAIN = [
    *("train", "--data", "digits", "--model", "lenet5(widths=[4, 8], hidden=16, dropout=0.5)", "--json"),
    *("--batch-size", "12", "--epochs", "3", "--resume", "auto", "--notice-s", "20", "--balance", "off"),
]

LENGTH = 60
SLOW_FROM = 2 * LENGTH
"""Workers take their time when they have told of their second epoch, until what is to happen to them has."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    with runs(tmp_path, *TRAIN, brake=Brake(tmp_path / "brake", SLOW_FROM)) as starter:
        yield starter


def in_the_second_epoch(event: Event) -> bool:
    return isinstance(event, WorkerProgress) and event.epoch == 1


def test_a_preempted_run_goes_on_by_the_same_command_as_if_nothing_had_been(
    start: Starter, tmp_path: Path
) -> None:
    command = start()
    command.wait_for(in_the_second_epoch)
    os.killpg(command.process.pid, signal.SIGTERM)  # as Slurm tells all processes of a step
    result = command.result()
    assert result.status == os.EX_TEMPFAIL, result.err
    assert result.err.splitlines()[-1] == "preempted; continue with: polyrhythm train --resume run"
    saved = [
        event for event in read_events(command.run / "events.jsonl") if isinstance(event, CheckpointSaved)
    ]
    assert LENGTH < saved[-1].step < 3 * LENGTH
    resumed, whole = shell(tmp_path, [*TRAIN, "--out", "run"], [*TRAIN, "--out", "whole"])
    assert resumed.figures["parameters_sha256"] == whole.figures["parameters_sha256"]
    assert resumed.figures["steps"] == 3 * LENGTH


def test_what_is_not_written_within_the_notice_is_given_up(start: Starter, tmp_path: Path) -> None:
    command = start("--notice-s", "3")
    command.wait_for(in_the_second_epoch)
    ranks = command.children()
    os.kill(ranks[1], signal.SIGSTOP)  # it will never take its step
    command.process.terminate()
    result = command.result()  # without the notice it would wait for ever
    assert result.status == os.EX_TEMPFAIL
    assert result.complaint == (
        "the notice of 3 s ran out before a checkpoint was whole: continue with --resume run, from the last one"
    )
    assert are_gone(ranks)
    (resumed,) = shell(tmp_path, [*TRAIN, "--out", "run"])
    assert resumed.figures["epochs"] == 3


def test_torchrun_starts_all_again_when_one_rank_was_preempted(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    brake = Brake(tmp_path / "brake", SLOW_FROM)
    braked = [braked_verb.__file__, str(brake.folder), str(brake.at)]
    launch = [*torchrun, "--max-restarts", "1", *braked, *TRAIN, "--out", "run"]
    with ending() as commands:
        command = Started(launch, tmp_path, tmp_path / "run")
        commands.append(command)
        command.wait_for(in_the_second_epoch)
        second = max(command.children())
        os.kill(second, signal.SIGTERM)
        brake.release()
        result = command.result()
    assert result.status == 0, result.err
    whole, ended = shell(tmp_path, [*TRAIN, "--out", "whole"], [*TRAIN, "--out", "run"])
    assert result.figures["parameters_sha256"] == whole.figures["parameters_sha256"]
    for key in ("parameters_sha256", "steps", "test_loss", "seconds"):  # it is not begun again
        assert ended.figures[key] == result.figures[key], key

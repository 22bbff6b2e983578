"""Real workers of which one is five times slower: parts follow their speeds, and a replay has the same bits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from on_processes.commands import Result, finished, shell
from polyrhythm.api.replay import replay
from polyrhythm.events import BatchesBalanced, WorkerProgress
from polyrhythm.reporting.event_log import read_events

IMAGES = 1438
VERB = Path(__file__).with_name("uneven_verb.py")


def trained(folder: Path, strategy: str, *options: str) -> Result:
    job = ["train", "--data", "digits", "--model", "mlp", "--strategy", strategy, "--workers", "2"]
    return finished(
        [sys.executable, str(VERB), "notes", *job, "--batch-size", "32", "--out", "run", "--json", *options],
        folder,
    )


@pytest.mark.parametrize(
    "strategy", ["synchronous", "parameter_server(consistency=synchronous)", "local_sgd(steps=2)"]
)
def test_parts_follow_speeds_and_are_replayed(tmp_path: Path, strategy: str) -> None:
    figures = trained(tmp_path, strategy, "--balance", "measured", "--epochs", "2").figures
    assert (figures["steps"], figures["images_not_seen"]) == (46, 0)
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert sum(event.images for event in events if isinstance(event, WorkerProgress)) == 2 * IMAGES
    sizes = [event.sizes for event in events if isinstance(event, BatchesBalanced)]
    assert all(sum(each) == 63 for each in sizes)  # in 23 steps of 62 or 63 images
    assert sorted(sizes[-1]) in ([10, 53], [11, 52])  # as five to one
    found = replay(tmp_path / "run")
    assert found["same"] is True
    assert found["parameters_sha256"]["replayed"] == figures["parameters_sha256"]


def test_backup_workers_end_together(tmp_path: Path) -> None:
    figures = trained(
        tmp_path, "backup_workers(spare=1)", "--balance", "measured", "--epochs", "2", "--workers", "3"
    ).figures
    assert figures["steps"] == 30


def test_bad_weights_are_refused_in_one_line(tmp_path: Path) -> None:
    job = ["train", "--data", "digits", "--model", "mlp"]
    wrong = [["--balance", "given(weights=[1, 2, 3])"], ["--balance", "given(weights=[1, -2])"]]
    wrong += [
        ["--balance", "measured", "--strategy", "ad_psgd"],
        ["--balance", "measured", "--on-loss", "rescale"],
    ]
    for result in shell(tmp_path, *([*job, *options] for options in wrong)):
        assert result.status == 2
        assert result.complaint.startswith("balance ")

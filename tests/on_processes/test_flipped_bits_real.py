"""A flipped bit in one of several real processes, in training and in loops of one's own."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from conformance.jobs import blobs, make_job, perceptron, result_of
from polyrhythm.events import Event, StateDiffers
from polyrhythm.launch.children import run_local
from polyrhythm.roles.job import Job

AFTER, STEPS, EVERY = 12, 32, 5


class Flips(nn.Module):
    """A perceptron that flips a bit of its parameters in the 13th pass, in the first process that gets there.

    Args:
        mark: file that this process makes.
    """

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.inner = perceptron()
        self.mark, self.passes = mark, 0

    def forward(self, images: Tensor) -> Tensor:
        if self.training and self.passes == AFTER:
            try:
                self.mark.touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                next(self.parameters()).data.view(torch.int32)[2, 3] ^= 1 << 20
        self.passes += self.training
        out: Tensor = self.inner(images)
        return out


def trained(workers: int, mark: Path) -> list[Event]:
    job: Job = make_job("synchronous", workers, dataset=blobs(train=4 * workers * STEPS), epochs=1)
    tolerance = replace(job.fault_tolerance, digest_every=EVERY)
    events: list[Event] = []
    run_local(
        replace(job, make_model=lambda: Flips(mark), fault_tolerance=tolerance), events.append, threads=1
    )
    return events


@pytest.mark.parametrize("workers", [2, 3])
def test_training_finds_a_flipped_bit_and_repairs_it(workers: int, tmp_path: Path) -> None:
    events = trained(workers, tmp_path / "flipped")
    [found] = [event for event in events if isinstance(event, StateDiffers)]  # none is found after the repair
    assert (len(found.workers), found.after_step, found.step) == (2 if workers == 2 else 1, 10, 15)
    assert events[-1].outcome == "done"  # type: ignore[attr-defined]
    if workers == 2:
        healthy = trained(workers, tmp_path)  # a folder: nobody flips
        assert result_of(events)["parameters_sha256"] == result_of(healthy)["parameters_sha256"]


@pytest.mark.parametrize(
    ("strategy", "workers"), [("synchronous", 3), ("synchronous", 2), ("diloco(steps=1)", 3)]
)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_loop_of_ones_own_is_repaired(strategy: str, workers: int, victim: int) -> None:
    script = Path(__file__).with_name("flipped_loop_task.py")
    command = [sys.executable, "-m", "polyrhythm", "run", "--workers", str(workers)]
    done = subprocess.run(
        [*command, str(script), strategy, str(victim)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    hashes = re.findall(r"rank \d has ([0-9a-f]{64})", said)
    assert len(hashes) == workers
    assert len(set(hashes)) == 1
    if strategy == "synchronous":
        names = f"worker {victim} began" if workers > 2 else "workers 0 and 1 began"
        assert f"{names} to differ" in said
        assert "between steps 10 and 15" in said

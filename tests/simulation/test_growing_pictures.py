"""Progressive resizing in whole runs: which sizes are seen when, and that a resumed run goes on at the right one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from conformance.jobs import make_job, resumed, simulated
from polyrhythm.training.size_schedules.progressive import Progressive

GROWING = Progressive(sizes=(2, 3), until=(0.25, 0.5))
SEEN: list[tuple[bool, int]] = []


class Pooling(nn.Module):
    """A network that takes pictures of any size, and notes which."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 6, 2)
        self.head = nn.Linear(6, 3)

    def forward(self, images: Tensor) -> Tensor:
        SEEN.append((self.training, images.shape[-1]))
        return self.head(torch.relu(self.convolution(images)).mean((2, 3)))


@pytest.mark.parametrize("spec", ["synchronous", "parameter_server(consistency=asynchronous)"])
def test_training_pictures_grow_and_test_pictures_do_not(spec: str) -> None:
    SEEN.clear()
    simulated(make_job(spec, 2, model=Pooling, epochs=4, size_schedule=GROWING))
    assert {side for training, side in SEEN if not training} == {4}
    sides = [side for training, side in SEEN if training]
    assert sides.count(2) == sides.count(3) == sides.count(4) / 2
    if spec == "synchronous":
        assert sides == sorted(sides)


def test_a_resumed_run_sees_what_it_would_have_seen(tmp_path: Path) -> None:
    job = make_job("synchronous", 2, model=Pooling, epochs=4, size_schedule=GROWING, schedule="constant")
    whole = simulated(job)
    # the first half alone, with the sizes of the whole
    half = Progressive(sizes=(2, 3), until=(0.5, 0.999))
    keeping = replace(job.checkpointing, folder=tmp_path)
    first = replace(job, checkpointing=keeping, learning=replace(job.learning, epochs=2, size_schedule=half))
    simulated(first)
    again = simulated(resumed(replace(job, checkpointing=keeping)))
    assert again.sha256 == whole.sha256

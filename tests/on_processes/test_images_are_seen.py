"""Which images real workers learned from when one of them was killed, told by the images themselves."""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conformance.jobs import CLASSES, SIDE, blobs, make_job, perceptron, result_of
from on_processes.brake import Brake
from on_processes.faults.play import LONG_SILENCE_S, of, played, send
from polyrhythm.data.dataset import Dataset, TensorSplit
from polyrhythm.events import CheckpointSaved, WorkerJoined, WorkerLost
from polyrhythm.roles.job import FaultTolerance

IMAGES, WORKERS, BATCH, EPOCHS = 240, 3, 4, 12
ROUND = 8
VICTIM = 2


class Noting(nn.Module):
    """A perceptron that notes the numbers of the images it learns from, which stand in their first pixels."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.inner = perceptron()
        self.folder = folder

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            numbers = (images[:, 0, 0, 0] * IMAGES).round().to(torch.int32)
            with (self.folder / str(os.getpid())).open("ab", buffering=0) as file:
                file.write(numbers.numpy().tobytes())
        out: Tensor = self.inner(images)
        return out


def numbered() -> Dataset:
    """Gives images that know their numbers."""
    images = torch.zeros(IMAGES, 1, SIDE, SIDE)
    images[:, 0, 0, 0] = torch.arange(IMAGES) / IMAGES
    return replace(blobs(), train=TensorSplit(images, torch.arange(IMAGES) % CLASSES))


def seen_in(folder: Path) -> Counter[int]:
    """Counts how often each image was learned from, by whomever."""
    return Counter(
        int(number) for path in folder.iterdir() for number in np.frombuffer(path.read_bytes(), np.int32)
    )


STEP = WORKERS * BATCH


@pytest.mark.parametrize(
    ("spec", "losses", "left_out", "in_vain"),
    [
        pytest.param(
            "parameter_server", FaultTolerance(restarts=1), False, BATCH, id="a successor takes its steps"
        ),
        pytest.param("parameter_server", FaultTolerance(), True, BATCH, id="its steps are not taken"),
        pytest.param("synchronous", FaultTolerance(), False, STEP, id="the others share them out"),
        pytest.param("synchronous", FaultTolerance(rescale=True), True, STEP, id="the others leave them out"),
        pytest.param(
            f"local_sgd(steps={ROUND})", FaultTolerance(), True, STEP + ROUND * BATCH, id="its round is lost"
        ),
    ],
)
def test_each_image_is_seen_once_an_epoch_or_the_number_is_stated(
    spec: str, losses: FaultTolerance, left_out: bool, in_vain: int, tmp_path: Path
) -> None:
    """Some are computed in vain: those of the step under way, which is taken again, and what died with the victim."""
    notes = tmp_path / "notes"
    notes.mkdir()
    brake = Brake(tmp_path / "brake", IMAGES // STEP)
    job = make_job(
        spec, WORKERS, dataset=numbered(), folder=tmp_path / "run", epochs=EPOCHS, batch_size=BATCH
    )
    job = replace(
        job,
        fault_tolerance=replace(losses, silence_s=LONG_SILENCE_S),
        make_model=lambda: brake.on(Noting(notes)),
    )
    heard = WorkerJoined if losses.restarts else WorkerLost
    result = result_of(
        played(job, (of(CheckpointSaved), send(VICTIM, signal.SIGKILL)), (of(heard), brake.release))
    )
    assert result["workers_lost"] == 1
    assert (result["images_not_seen"] > 0) == left_out
    seen = seen_in(notes)
    assert sorted(seen) == list(range(IMAGES))
    assert 0 <= seen.total() + result["images_not_seen"] - EPOCHS * IMAGES <= in_vain
    if not left_out:
        assert min(seen.values()) == EPOCHS

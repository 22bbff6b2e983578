"""The job of all peers: random images, a small network with a forward pass of 40 ms, and a diary of its steps."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

WORKERS, BATCH, STEPS_PER_EPOCH, EPOCHS = 3, 16, 37, 24
IMAGES = WORKERS * BATCH * STEPS_PER_EPOCH
FORWARD_S = 0.04
RATE = 0.05


def dataset() -> tuple[Tensor, Tensor]:
    """Return images (n, 1, 8, 8), all different, and labels that a linear function of them decides."""
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(IMAGES, 1, 8, 8, generator=draw)
    return images, (images.flatten(1) @ torch.randn(64, 10, generator=draw)).argmax(1)


def keys_of(images: Tensor) -> Tensor:
    """Return a number for each image that identifies it, (n,) float64."""
    weights = torch.rand(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return images.flatten(1).double() @ weights


def rank() -> int:
    """Return the rank of this process: from the environment, or by its name under `polyrhythm.train`."""
    for name in ("REPLICA_GROUP_ID", "RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return int(multiprocessing.current_process().name.rpartition(" ")[2])


class Diary:
    """A process's file of rows: kind (0: a step begins, 1: a step's update is done), monotonic time, n, n keys."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def write(self, kind: int, images: Tensor) -> None:
        """Append a row."""
        row = torch.cat(
            [torch.tensor([kind, time.monotonic(), len(images)], dtype=torch.float64), keys_of(images)]
        )
        with (Path(self.folder) / f"{rank()}-{os.getpid()}").open("ab") as file:
            file.write(row.numpy().tobytes())


class Paced(nn.Module):
    """A perceptron with a forward pass that waits in training, as for an accelerator, and is written to the diary."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        self.diary = Diary(folder)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.diary.write(0, images)
            time.sleep(FORWARD_S)
        out: Tensor = self.layers(images)
        return out

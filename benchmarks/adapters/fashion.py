"""What the three loops share: pictures of Fashion-MNIST, a small network, and where results go.

The network has no dropout and computes in float64, so that several workers in step can be compared with one by bits.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from polyrhythm.data.open import open_data

TRAINED, TESTED, EPOCHS, TOGETHER = 3_010, 1_000, 2, 50
"""Pictures, passes over them, and pictures of a step, of all workers together."""


def pictures() -> tuple[TensorDataset, TensorDataset]:
    """Return the first pictures of the training and the test set, and their labels."""
    data = open_data("fashion-mnist")
    found = []
    for split, count in ((data.train, TRAINED), (data.test, TESTED)):
        places = torch.arange(count)
        found.append(TensorDataset(split.images(places).double(), split.labels[places]))
    return found[0], found[1]


class Network(nn.Sequential):
    """Two convolutions and two layers; worker 1 may be killed in a pass of the second epoch."""

    def __init__(self, killed: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(400, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip
        self.double()
        self.killed = killed and os.environ.get("RANK") == "1"
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        if self.killed and self.passes > 1.2 * TRAINED / TOGETHER:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def arguments(about: str | None) -> argparse.Namespace:
    """Return the options of a loop, with the pictures of one worker's step."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--strategy", default="", help="of Polyrhythm; none: the library alone")
    parser.add_argument("--out", type=Path, required=True, help="folder for what came of it")
    parser.add_argument("--killed", action="store_true", help="kill worker 1 in the second epoch")
    parser.add_argument("--workers", type=int, default=2)
    found = parser.parse_args()
    found.batch_size = TOGETHER // (found.workers if found.strategy else 1)
    return found


def keep(out: Path, network: nn.Module, top1: float) -> None:
    """Write a worker's final weights and its test result."""
    found: dict[str, Any] = {
        "model": nn.utils.parameters_to_vector(network.parameters()).detach(),
        "top1": top1,
    }
    torch.save(found, out / f"worker-{os.environ.get('RANK', '0')}.pt")

"""Data, network and test that all jobs share."""

import gzip
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

BATCH_SIZE, RATE, SEED = 64, 0.05, 0


def read(part: str, images: int) -> TensorDataset:
    """Return the first images of Fashion-MNIST's `train` or `t10k`, with their classes."""
    folder = Path(os.environ["FASHION_MNIST"])
    with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(), np.uint8, offset=16)
    with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    images_of = torch.from_numpy(pixels.reshape(-1, 1, 28, 28)[:images].astype(np.float32) / 255)
    return TensorDataset(images_of, torch.from_numpy(labels[:images].astype(np.int64)))


def network() -> nn.Module:
    """Return a LeNet-5 with 32 and 64 feature maps."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 49, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a job."""
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Return the share of 2,000 test images that are classified correctly."""
    images, labels = read("t10k", 2000).tensors
    model.eval()
    predicted: Tensor = model(images).argmax(1)
    return float((predicted == labels).double().mean())

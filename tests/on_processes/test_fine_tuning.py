"""Fine-tuning on real photographs from weights that others trained, by the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_sample_image

from on_processes.commands import finished
from polyrhythm.models.pretrained.efficientnet_lite0 import _in_package, as_timm
from polyrhythm.models.weights import read_tensors

SIDE = 96
CLASSES = {"roofs": ("china.jpg", 0), "gardens": ("china.jpg", 300), "flower": ("flower.jpg", 150)}
"""A photograph, and the rows below which windows of it lie."""


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Windows of the photographs: training has their left, tests their right, with nothing in common."""
    numbers = np.random.default_rng(0)
    for name, (photograph, first_row) in CLASSES.items():
        pixels = load_sample_image(photograph)
        for split, columns, count in (("train", (0, 330), 10), ("test", (430, 540), 5)):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                top, left = first_row + numbers.integers(0, 30), numbers.integers(*columns)
                window = pixels[top : top + SIDE, left : left + SIDE]
                Image.fromarray(window).save(folder / f"{number}.jpg", quality=95)
    return tmp_path / "photos"


def test_a_new_head_on_a_trained_body_tells_photographs_apart(photographs: Path) -> None:
    options = {
        "data": photographs,
        "model": "timm.tf_efficientnet_lite0",
        "weights": "efficientnet_lite0",
        "freeze": "body",
        "workers": 1,
        "image-size": 64,
        "epochs": 3,
        "batch-size": 6,
        "optimizer": "adam(lr=0.01)",
        "keep-checkpoints": 0,
        "out": photographs.parent / "run",
    }
    arguments = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    command = [sys.executable, "-m", "polyrhythm", "train", "--json", *arguments]
    done = finished(command, photographs.parent)
    assert done.figures["test_top1"] >= 0.7
    assert "pixels: centered" in (photographs.parent / "run" / "config.yaml").read_text()
    learned = load_file(photographs.parent / "run" / "model.safetensors")
    given = as_timm(read_tensors(_in_package()))
    for name, tensor in given.items():
        if not name.startswith("classifier."):
            assert torch.equal(learned[name], tensor), name
    assert learned["classifier.weight"].abs().max() > 0

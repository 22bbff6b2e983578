"""Workers of a pipeline that hardly have the memory that was said take no more."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import polyrhythm

SIDE, WIDTHS = 64, (3, 32, 32, 64, 64)


def test_scarce_memory_is_given_back_as_soon_as_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyrhythm.roles.model_workload.memory_of", lambda device: 150_000_000)
    generator = torch.Generator().manual_seed(3)
    pictures = torch.randn(96, 3, SIDE, SIDE, generator=generator), torch.arange(96) % 10
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(pairwise(WIDTHS)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if number % 2 else []
    run = polyrhythm.train(
        data=(pictures, pictures),
        model=nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], 10)),
        strategy="pipeline(microbatches=8, schedule=gpipe, cut=['6'])",
        workers=2,
        batch_size=16,
        epochs=1,
        threads=1,
        keep_checkpoints=0,
        start_method="fork",
        out=tmp_path / "run",
    )
    told = run.figures["pipeline"]
    said, measured = told["memory"][0]["most"], told["measured_bytes"][0]
    assert 75_000_000 < said < 150_000_000
    assert measured <= 1.1 * said

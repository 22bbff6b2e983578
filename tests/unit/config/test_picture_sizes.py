"""What a configuration says of the sizes of pictures, and what becomes of it in a job."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate

from polyrhythm.augmentation.transforms.flip import Flip
from polyrhythm.augmentation.transforms.window import Window
from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.data.loader import Loader, Share
from polyrhythm.errors import RequestError
from polyrhythm.roles.job import CheckpointConfig, Job

POOLING = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))


def job(**values: Any) -> Job:
    return assemble(
        configure({"data": "digits", "model": POOLING, "workers": 1, **values}), CheckpointConfig()
    )


def test_a_scale_puts_a_window_before_all_other_changes() -> None:
    made = job(scale=12, image_size=8, augment="flip")
    assert made.learning.transform.transforms == (Window(size=8), Flip())
    assert made.dataset.image_shape == (1, 8, 8)


def test_a_scale_alone_is_a_window() -> None:
    assert job(scale=12, image_size=8).learning.transform.transforms == (Window(size=8),)
    assert job().learning.transform is None


def test_sizes_are_tried_out_before_anything_starts() -> None:
    grows = "progressive(sizes=[4, 6], until=[0.3, 0.6])"
    assert str(job(size_schedule=grows, epochs=10).learning.size_schedule) == grows
    with pytest.raises(RequestError, match="has images of 4 pixels, which the model does not support"):
        job(size_schedule=grows, epochs=10, model="mlp")
    with pytest.raises(RequestError, match="9 pixels are more than the 8"):
        job(size_schedule="progressive(sizes=[9], until=[0.5])")


def test_a_loader_scales_what_was_changed() -> None:
    made = job()
    loader = Loader(made.dataset.train, Share(0, 1, 16, seed=0))
    full = next(loader.epoch(0))
    loader.side = 5
    small = next(loader.epoch(0))
    wanted = interpolate(full.images, (5, 5), mode="bilinear", antialias=True)
    assert torch.equal(small.images, wanted)
    assert torch.equal(small.labels, full.labels)

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from polyrhythm.errors import RequestError
from polyrhythm.models.create import create_model
from polyrhythm.training import model_sizes
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.model_sizes import shares_of_numbers, sizes_of, time_shares


def net() -> nn.Module:
    """A convolution of 20 numbers and 576 operations, and a layer of 165 numbers and 320 operations."""
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(32, 5))


def test_shares_are_those_of_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_sizes, "FlatParameters", partial(FlatParameters, bucket_bytes=80))
    sizes = sizes_of(net(), (1, 4, 4))
    assert sizes.buckets == (165, 20)
    assert sizes.shares == pytest.approx((320 / 896, 576 / 896))
    assert (sizes.parameters, sizes.nbytes) == (185, 740)


def test_without_arithmetic_shares_are_those_of_the_numbers() -> None:
    made = nn.Sequential(nn.PReLU(3), nn.PReLU(9))
    flat = FlatParameters(made, bucket_bytes=12)
    assert time_shares(made, flat, (3, 1, 1)) == shares_of_numbers(made, flat) == (9 / 12, 3 / 12)


def test_one_bucket_takes_all_the_time() -> None:
    assert sizes_of(net(), (1, 4, 4)).shares == (1.0,)


def test_a_large_model_needs_no_memory_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = create_model("vgg16", classes=1000, image_shape=(3, 224, 224))
    sizes = sizes_of(model, (3, 224, 224))
    assert sizes.parameters == 138_357_544
    assert sum(sizes.shares) == pytest.approx(1)
    # the last layer and the two before hold nine tenths of the numbers, and a hundredth of the arithmetic
    assert sum(sizes.buckets[:3]) == 123_642_856
    assert sum(sizes.shares[:3]) == pytest.approx(0.008, abs=0.001)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(RequestError, match="no parameter to train"):
        sizes_of(net().requires_grad_(False), (1, 4, 4))

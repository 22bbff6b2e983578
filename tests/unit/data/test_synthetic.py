"""Synthetic pictures: of any size and number, each the same however it is asked for."""

from __future__ import annotations

import pytest
import torch

from polyrhythm.data.open import open_data
from polyrhythm.errors import RequestError


def test_sizes_and_classes_are_as_asked_for() -> None:
    data = open_data("synthetic(classes=1200, size=16, train=2400, test=7)")
    assert (len(data.classes), data.image_shape, len(data.train), len(data.test)) == (
        1200,
        (3, 16, 16),
        2400,
        7,
    )
    assert torch.equal(data.train.labels.bincount(), torch.full((1200,), 2))
    assert data.train.images(torch.tensor([5, 3])).shape == (2, 3, 16, 16)


def test_a_picture_depends_on_its_number_and_part_alone() -> None:
    data = open_data("synthetic(classes=2, size=8, channels=1, train=50, test=50)")
    again = open_data("synthetic(classes=2, size=8, channels=1, train=50, test=50)")
    some = data.train.images(torch.tensor([4, 9, 4]))
    assert torch.equal(some[0], some[2])
    assert torch.equal(some[1], again.train.images(torch.arange(50))[9])
    assert not torch.equal(some[0], data.test.images(torch.tensor([4]))[0])


def test_classes_can_be_told_apart() -> None:
    data = open_data("synthetic(classes=2, size=16, train=200, test=100)")
    train, test = (
        data.train.images(torch.arange(200)).flatten(1),
        data.test.images(torch.arange(100)).flatten(1),
    )
    means = torch.stack([train[data.train.labels == label].mean(0) for label in (0, 1)])
    found = torch.cdist(test, means).argmin(1)
    assert (found == data.test.labels).float().mean() > 0.95


def test_one_class_is_refused() -> None:
    with pytest.raises(RequestError, match="classes"):
        open_data("synthetic(classes=1)")

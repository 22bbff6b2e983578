"""Scales, flips, ten crops and dense evaluation, held to the same done by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from polyrhythm.data.dataset import TensorSplit
from polyrhythm.data.image_files import ImageFileSplit
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.dense import SlidingWindows
from polyrhythm.evaluation.evaluate import evaluate, evaluate_scores, in_evaluation_mode
from polyrhythm.evaluation.views import ViewedClassifier, Views
from polyrhythm.models.create import create_model

SHAPE = (1, 28, 28)
EVERY = torch.arange(6)


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(5)
    return create_model("lenet5", classes=4, image_shape=SHAPE)


@pytest.fixture
def split() -> TensorSplit:
    generator = torch.Generator().manual_seed(6)
    return TensorSplit(torch.randn(6, *SHAPE, generator=generator), torch.tensor([0, 1, 2, 3, 0, 1]))


def _seen(model: torch.nn.Module, split: TensorSplit, **views: object) -> Tensor:
    classifier = ViewedClassifier(model, split, Views(**views), SHAPE)
    with in_evaluation_mode(model):
        return classifier.probabilities(EVERY)


def _softmax(model: torch.nn.Module, images: Tensor) -> Tensor:
    with in_evaluation_mode(model):
        return model(images).softmax(1)


def test_a_flip_averages_probabilities_not_scores(model: torch.nn.Module, split: TensorSplit) -> None:
    images = split.images(EVERY)
    expected = (_softmax(model, images) + _softmax(model, images.flip(3))) / 2
    torch.testing.assert_close(_seen(model, split, flip=True), expected)


def test_scales_are_center_crops_of_resized_pictures(model: torch.nn.Module, split: TensorSplit) -> None:
    images = split.images(EVERY)
    larger = interpolate(images, (36, 36), mode="bilinear", antialias=True)[:, :, 4:32, 4:32]
    expected = (_softmax(model, images) + _softmax(model, larger)) / 2
    torch.testing.assert_close(_seen(model, split, scales=(28, 36)), expected)


def test_ten_crops(model: torch.nn.Module, split: TensorSplit) -> None:
    larger = interpolate(split.images(EVERY), (32, 32), mode="bilinear", antialias=True)
    pieces = [
        larger[:, :, top : top + 28, left : left + 28]
        for top, left in ((0, 0), (0, 4), (4, 0), (4, 4), (2, 2))
    ]
    views = [_softmax(model, view) for piece in pieces for view in (piece, piece.flip(3))]
    torch.testing.assert_close(_seen(model, split, ten_crop=True), torch.stack(views).mean(0))


def test_dense_averages_scores_over_places_and_probabilities_over_scales(
    model: torch.nn.Module, split: TensorSplit
) -> None:
    expected = []
    for side in (28, 32):
        images = interpolate(split.images(EVERY), (side, side), mode="bilinear", antialias=True)
        with in_evaluation_mode(model):
            expected.append(SlidingWindows(model, (28, 28), stride=4)(images).softmax(1))
    found = _seen(model, split, dense=True, scales=(28, 32))
    torch.testing.assert_close(found, torch.stack(expected).mean(0))
    assert ViewedClassifier(model, split, Views(dense=True), SHAPE).method == "convolutional"


def test_dense_falls_back_to_windows_and_says_so(split: TensorSplit) -> None:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Softmax(1), torch.nn.Linear(784, 4))
    classifier = ViewedClassifier(model, split, Views(dense=True, scales=(40,)), SHAPE)
    assert classifier.method == "sliding windows (its head has Softmax)"
    images = interpolate(split.images(EVERY), (40, 40), mode="bilinear", antialias=True)
    starts = (0, 4, 8, 12)
    with in_evaluation_mode(model):
        scores = [model(images[:, :, y : y + 28, x : x + 28]) for y in starts for x in starts]
        torch.testing.assert_close(classifier.probabilities(EVERY), torch.stack(scores).mean(0).softmax(1))


def test_windows_reach_the_far_edge() -> None:
    seen = []
    SlidingWindows(lambda images: seen.append(images) or images.flatten(1), (4, 4), stride=3)(
        torch.arange(49.0).view(1, 1, 7, 7)
    )
    assert [int(piece[0, 0, 0, 0]) for piece in seen] == [0, 3, 21, 24]
    seen.clear()
    SlidingWindows(lambda images: seen.append(images) or images.flatten(1), (4, 4), stride=3)(
        torch.arange(64.0).view(1, 1, 8, 8)
    )
    assert sorted({int(piece[0, 0, 0, 0]) % 8 for piece in seen}) == [0, 3, 4]


def test_the_picture_itself_gives_what_an_ordinary_test_gives(
    model: torch.nn.Module, split: TensorSplit
) -> None:
    names = ("a", "b", "c", "d")
    plain = evaluate(model, split, classes=names)
    classifier = ViewedClassifier(model, split, Views(), SHAPE)
    with in_evaluation_mode(model):
        found = evaluate_scores(
            lambda indices: classifier.probabilities(indices).log(), split.labels, classes=names, batch_size=4
        )
    assert found.loss == pytest.approx(plain.loss, rel=1e-5)
    assert torch.equal(found.confusion, plain.confusion)
    assert found.balanced_accuracy == pytest.approx(
        sum(entry.recall for entry in plain.per_class) / 4, abs=1e-12
    )


def test_photographs_are_seen_whole_whatever_their_shape(tmp_path: Path) -> None:
    files = []
    for number, (width, height) in enumerate(((60, 40), (40, 60), (60, 40), (48, 48))):
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        path = tmp_path / f"{number}.png"
        Image.fromarray(pixels).save(path)
        files.append(str(path))
    split = ImageFileSplit(files, torch.tensor([0, 1, 0, 1]), 28)
    assert [tuple(picture.shape) for picture in split.whole(torch.arange(4), 32)] == [
        (3, 32, 48),
        (3, 48, 32),
        (3, 32, 48),
        (3, 32, 32),
    ]
    torch.manual_seed(8)
    model = create_model("lenet5", classes=2, image_shape=(3, 28, 28))
    classifier = ViewedClassifier(model, split, Views(dense=True, flip=True, scales=(32,)), (3, 28, 28))
    with in_evaluation_mode(model):
        together = classifier.probabilities(torch.arange(4))
        alone = torch.cat([classifier.probabilities(torch.tensor([number])) for number in range(4)])
        picture = split.whole(torch.tensor([1]), 32)[0][None]
        windows = SlidingWindows(model, (28, 28), stride=4)
        by_hand = (windows(picture).softmax(1) + windows(picture.flip(3)).softmax(1)) / 2
    torch.testing.assert_close(together, alone)
    torch.testing.assert_close(together[1:2], by_hand)


def test_views_that_cannot_be_are_refused(model: torch.nn.Module, split: TensorSplit) -> None:
    with pytest.raises(RequestError, match="give one of them"):
        Views(dense=True, ten_crop=True)
    with pytest.raises(RequestError, match="scale 0 is too small"):
        Views(scales=(32, 0))
    with pytest.raises(RequestError, match="scale 20 is below the 28 pixels"):
        ViewedClassifier(model, split, Views(scales=(32, 20)), SHAPE)

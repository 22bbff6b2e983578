"""What a run keeps of its final model's predictions."""

from __future__ import annotations

import base64
import csv
import io
import json

import numpy as np
import torch
from PIL import Image

from polyrhythm.data.dataset import Dataset, TensorSplit
from polyrhythm.evaluation.evaluate import evaluate_scores, share_interval
from polyrhythm.evaluation.predictions import pictures_json, predictions_csv

LOGITS = torch.tensor([[4.0, 0.0, 0.0], [0.0, 1.0, 0.0], [5.0, 0.0, 1.0], [0.0, 0.0, 2.0], [0.0, 3.0, 0.0]])
LABELS = torch.tensor([0, 1, 1, 2, 0])
CLASSES = ("ant", "bee, the", "cat")


def found():
    return evaluate_scores(lambda numbers: LOGITS[numbers], LABELS, classes=CLASSES, batch_size=2)


def pictures():
    images = torch.linspace(-1, 1, 5 * 3 * 4 * 4).view(5, 3, 4, 4)
    split = TensorSplit(images, LABELS)
    return Dataset("few", split, split, CLASSES, (3, 4, 4), 1, black=(-1.0,) * 3, white=(1.0,) * 3)


def opened(text):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))


def test_every_image_has_a_line() -> None:
    rows = list(csv.DictReader(io.StringIO(predictions_csv(found(), LABELS, CLASSES))))
    probabilities = torch.softmax(LOGITS.double(), 1).amax(1)
    assert [row["class"] for row in rows] == ["ant", "bee, the", "bee, the", "cat", "ant"]
    assert [row["predicted"] for row in rows] == ["ant", "bee, the", "ant", "cat", "bee, the"]
    assert [int(row["right"]) for row in rows] == [1, 1, 0, 1, 0]
    assert all(abs(float(row["probability"]) - p) < 1e-5 for row, p in zip(rows, probabilities, strict=True))


def test_the_surest_mistakes_come_first_and_look_as_they_are() -> None:
    shown = json.loads(pictures_json(found(), pictures(), lambda images: -images))
    assert [(each["image"], each["class"], each["predicted"]) for each in shown["mistakes"]] == [
        (2, "bee, the", "ant"),
        (4, "ant", "bee, the"),
    ]
    picture = opened(shown["mistakes"][0]["png"])
    assert picture.shape == (56, 56, 3)  # each of 4 by 4 pixels is 14 wide
    unit = (pictures().test.images(torch.tensor([2]))[0] + 1) / 2
    assert np.array_equal(picture[::14, ::14], unit.mul(255).round().to(torch.uint8).permute(1, 2, 0).numpy())
    before, after = (opened(each) for each in shown["augmented"][0]["pngs"])
    assert np.abs(before.astype(int) + after.astype(int) - 255).max() <= 1
    assert len(shown["augmented"]) == 5


def test_pictures_that_cannot_be_shown_are_left_out() -> None:
    split = TensorSplit(torch.zeros(5, 2, 4, 4), LABELS)
    other = Dataset("few", split, split, CLASSES, (2, 4, 4), 1)
    assert json.loads(pictures_json(found(), other)) == {"mistakes": [], "augmented": []}


def test_an_interval_of_few_images_is_wide() -> None:
    """Against the solutions of (p - x)^2 = z^2 x (1 - x) / n."""
    for right, count in ((1, 8), (0, 8), (8, 8), (970, 1000)):
        z, p = 1.959964, right / count
        low, high = sorted(np.roots([1 + z * z / count, -(2 * p + z * z / count), p * p]).real)
        assert np.allclose(share_interval(p, count), (max(0, low), min(1, high)), atol=1e-9)
    assert share_interval(0.0, 0) == (0.0, 1.0)

"""Predictions of a tested network for every image, as files of a run folder.

`predictions.csv`   image, class, predicted, probability, right: one line per test image, in the order of the data
`pictures.json`     the most confident mistakes, and augmented training images, as PNG in base64, for the report
"""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from polyrhythm.data.dataset import Dataset, read_readable
from polyrhythm.data.resized import StreamedWindowSplit, Uncut
from polyrhythm.data.shards import ShardSplit
from polyrhythm.escaping import csv_cell
from polyrhythm.evaluation.evaluate import Evaluation

PREDICTIONS_FILE, PICTURES_FILE = "predictions.csv", "pictures.json"
_MISTAKES, _AUGMENTED = 12, 6
_LONGEST_SIDE, _SHORTEST_SIDE = 112, 56


def predictions_csv(found: Evaluation, labels: Tensor, classes: Sequence[str]) -> str:
    """Return one line a test image.

    Args:
        found: test result of images in their order.
        labels: (images,), int64.
        classes: names, in the order of the labels.
    """
    written = io.StringIO()
    lines = csv.writer(written, lineterminator="\n")
    lines.writerow(["image", "class", "predicted", "probability", "right"])
    names = [csv_cell(name) for name in classes]
    columns = (labels.tolist(), found.predicted.tolist(), found.probability.tolist())
    for number, (label, predicted, probability) in enumerate(zip(*columns, strict=True)):
        if predicted < 0:  # it could not be read
            continue
        lines.writerow(
            [
                number,
                names[label],
                names[predicted],
                f"{probability:.6f}",
                int(label == predicted),
            ]
        )
    return written.getvalue()


def pictures_json(
    found: Evaluation, dataset: Dataset, transform: Callable[[Tensor], Tensor] | None = None
) -> str:
    """Return images of the surest mistakes, and of the first training images before and after augmentation.

    Args:
        found: test result of `dataset.test`.
        dataset: images of 1 or 3 channels; others are not shown.
        transform: augmentation of training images, (B, C, H, W) to (B, C, H, W); None: not shown.
    """
    shown: dict[str, Any] = {"mistakes": [], "augmented": []}
    streamed = (ShardSplit, StreamedWindowSplit)  # read in their order, and not here and there
    if dataset.image_shape[0] not in (1, 3) or isinstance(dataset.test, streamed):
        return json.dumps(shown)
    labels = dataset.test.labels
    wrong = ((found.predicted != labels) & (found.predicted >= 0)).nonzero().flatten()
    surest = wrong[found.probability[wrong].argsort(descending=True)[:_MISTAKES]]
    surest, images = read_readable(dataset.test.images, surest)
    for number, picture in zip(surest.tolist(), _pngs(dataset, images), strict=True):
        shown["mistakes"].append(
            {
                "image": number,
                "class": dataset.classes[int(labels[number])],
                "predicted": dataset.classes[int(found.predicted[number])],
                "probability": round(float(found.probability[number]), 4),
                "png": picture,
            }
        )
    train = dataset.train
    if transform is not None and not isinstance(train, streamed):
        first = torch.arange(min(_AUGMENTED, len(train)))
        first, images = read_readable(train.images, first)
        larger = train.uncut(first) if isinstance(train, Uncut) else images
        plain, changed = _pngs(dataset, images), _pngs(dataset, transform(larger))
        pairs = zip(first.tolist(), plain, changed, strict=True)
        shown["augmented"] = [
            {
                "image": number,
                "class": dataset.classes[int(train.labels[number])],
                "pngs": [one, other],
            }
            for number, one, other in pairs
        ]
    return json.dumps(shown)


def _pngs(dataset: Dataset, images: Tensor) -> list[str]:
    """Return images (B, C, H, W) as PNG in base64; small ones are enlarged, so that their pixels can be seen."""
    if not len(images):
        return []
    black, white = (torch.tensor(tone).view(1, -1, 1, 1) for tone in (dataset.black, dataset.white))
    unit = ((images.detach().cpu().float() - black) / (white - black)).clamp(0, 1)
    longest = max(unit.shape[2:])
    if longest < _SHORTEST_SIDE:
        unit = functional.interpolate(unit, scale_factor=-(-_SHORTEST_SIDE // longest), mode="nearest")
    elif longest > _LONGEST_SIDE:
        unit = functional.interpolate(
            unit, scale_factor=_LONGEST_SIDE / longest, mode="bilinear", antialias=True
        )
    found = []
    for pixels in unit.mul(255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy():
        packed = io.BytesIO()
        Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).save(
            packed, "PNG", optimize=True
        )
        found.append(base64.b64encode(packed.getvalue()).decode("ascii"))
    return found

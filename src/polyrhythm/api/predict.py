"""Classification of pictures, for the verb `predict`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from polyrhythm.api.served import Served, load_served
from polyrhythm.config.run_config import NetworkOptions
from polyrhythm.data.image_files import image_files
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.ensemble import average

_BATCH = 64


def predict(
    images: str | Path | Sequence[str | Path],
    weights: str | Path | Sequence[str | Path],
    *,
    top: int = 5,
    device: str = "auto",
    **options: Unpack[NetworkOptions],
) -> dict[str, Any]:
    """Return the most likely classes of pictures.

    Args:
        images: files; a folder stands for the files in it.
        weights: a run folder or a file of weights; several are listed side by side, and averaged.
        top: number of classes per picture.
        device: `cpu`, `cuda` or `auto`.
        **options: `data` and `model`, if the weights do not record them.

    Returns:
        `weights`, and `images`: for each its `image`, `classes` (of all networks together), a list of `class` and
        `probability`, most likely first, and `networks`, one such list each.

    Raises:
        RequestError: no such picture, or one that cannot be read; networks for different classes.
    """
    files = _files([images] if isinstance(images, str | Path) else images)
    paths = [weights] if isinstance(weights, str | Path) else list(weights)
    served = [load_served(path, device=device, **options) for path in paths]
    for other in served[1:]:
        if other.classes != served[0].classes:
            raise RequestError(
                f"{other.weights} and {served[0].weights} know different classes: ask them one at a time"
            )
    found: list[dict[str, Any]] = []
    for start in range(0, len(files), _BATCH):
        part = files[start : start + _BATCH]
        each = [_probabilities(network, part) for network in served]
        found += _described(part, each, served[0].classes, top)
    return {"weights": [str(network.weights) for network in served], "images": found}


def _files(given: Sequence[str | Path]) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, given):
        found += map(Path, image_files(path)) if path.is_dir() else [path]
    if not found:
        raise RequestError("there are no pictures to look at: name files, or a folder that holds some")
    for path in found:
        if not path.exists():
            raise RequestError(f"there is no picture {path}: name a file or a folder of files")
    return found


def _probabilities(served: Served, files: list[Path]) -> Tensor:
    pictures = torch.stack([served.preprocessing.read(path) for path in files])
    with torch.no_grad():
        found: Tensor = served.network(pictures.to(served.device)).cpu()
    return found


def _described(
    files: list[Path], each: list[Tensor], classes: tuple[str, ...], top: int
) -> list[dict[str, Any]]:
    together = average(each)
    return [
        {
            "image": str(path),
            "classes": _listed(together[row], classes, top),
            "networks": [_listed(one[row], classes, top) for one in each],
        }
        for row, path in enumerate(files)
    ]


def _listed(probabilities: Tensor, classes: tuple[str, ...], top: int) -> list[dict[str, Any]]:
    likeliest = probabilities.topk(min(top, len(classes)))
    return [
        {"class": classes[index], "probability": probability}
        for probability, index in zip(likeliest.values.tolist(), likeliest.indices.tolist(), strict=True)
    ]

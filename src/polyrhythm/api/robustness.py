"""Accuracy of networks on distorted pictures, for the verb `evaluate --robustness`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Unpack

import torch
from PIL import Image
from torch import Tensor

from polyrhythm.augmentation.tones import Tones
from polyrhythm.config.run_config import TrainedOptions
from polyrhythm.config.trained import Trained, load_trained, voters
from polyrhythm.data.dataset import Split
from polyrhythm.data.seeding import generator_for
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.ensemble import Together
from polyrhythm.evaluation.robustness import declines, examples
from polyrhythm.reporting.pages.several_runs import write_robustness

_EXAMPLE_SIDE = 96


def robustness(
    weights: str | Path | Sequence[str | Path],
    *,
    images: int = 1000,
    kinds: Sequence[str] = (),
    plot: str | Path | None = None,
    device: str = "auto",
    **options: Unpack[TrainedOptions],
) -> dict[str, Any]:
    """Test networks under augmentations and corruptions of increasing strength.

    Args:
        weights: run folders or files of weights, each tested by itself.
        images: number of test images, drawn once for all; fewer if there are fewer.
        kinds: names of augmentations and corruptions, such as `rotation`; empty: all of them.
        plot: an HTML file for curves, table and a picture under every change; None: none is written.
        device: `cpu`, `cuda` or `auto`.
        **options: `data`, `model`, `image_size` and `skip_unreadable`, as for `evaluate`.

    Returns:
        `data`, `images`, `plot`, and `models`: for each `weights`, `model`, `clean_top1`, `declines` (`name`, `kind`,
        `strengths`, `top1`), and `corrupted_top1`, the mean over all corruptions and severities (None without any);
        `together`: the same of their mean probabilities, where several were trained on pictures of one size.

    Raises:
        RequestError: the request is invalid.
    """
    if plot is not None and not Path(plot).parent.is_dir():
        raise RequestError(f"there is no folder {Path(plot).parent}: make it first")
    named = [weights] if isinstance(weights, str | Path) else list(weights)
    paths = [path for each in named for path in voters(Path(each))]
    trained = [load_trained(path, device=device, **options) for path in paths]
    found = [_tested(each, images, kinds) for each in trained]
    together = None
    if len(trained) > 1 and len({_pictures_of(each) for each in trained}) == 1:
        model = Together([each.model for each in trained])
        ensemble = replace(trained[0], model=model, model_name=f"ensemble of {len(trained)}")
        together = _tested(ensemble, images, kinds) | {"weights": "together"}
    data = trained[0].dataset.name
    if plot is not None:
        dataset = trained[0].dataset
        strips = examples(dataset, int(_drawn(dataset.test, images)[0]), kinds)
        tones = Tones(dataset.black, dataset.white)
        pictures = {name: _jpeg(strip, tones) for name, strip in strips.items()}
        write_robustness(Path(plot), data, found if together is None else [*found, together], pictures)
    counted = min(images, len(trained[0].dataset.test))
    return {
        "data": data,
        "images": counted,
        "plot": str(plot) if plot else None,
        "models": found,
        "together": together,
    }


def _pictures_of(trained: Trained) -> tuple[object, ...]:
    dataset = trained.dataset
    return dataset.classes, dataset.image_shape, dataset.black, dataset.white, dataset.shown


def _drawn(test: Split, images: int) -> Tensor:
    return torch.randperm(len(test), generator=generator_for("robustness"))[:images].sort().values


def _jpeg(strip: Tensor, tones: Tones) -> bytes:
    """Return pictures (n, C, H, W) beside each other as a JPEG file of `_EXAMPLE_SIDE` pixels in height."""
    black, white = tones.of(strip)
    unit = ((strip - black) / (white - black)).clamp(0, 1)
    row = (torch.cat(list(unit), dim=2) * 255).round().byte().permute(1, 2, 0).numpy()
    image = Image.fromarray(row.squeeze(2) if row.shape[2] == 1 else row)
    size = round(image.width * _EXAMPLE_SIDE / image.height), _EXAMPLE_SIDE
    file = BytesIO()
    image.resize(size, Image.Resampling.LANCZOS).save(file, "JPEG", quality=85)
    return file.getvalue()


def _tested(trained: Trained, images: int, kinds: Sequence[str]) -> dict[str, Any]:
    indices = _drawn(trained.dataset.test, images)
    clean, found = declines(trained.model, trained.dataset, indices, trained.device, kinds)
    corrupted = [top1 for each in found if each.kind == "corruption" for top1 in each.top1]
    return {
        "weights": str(trained.file),
        "model": trained.model_name,
        "clean_top1": clean,
        "corrupted_top1": sum(corrupted) / len(corrupted) if corrupted else None,
        "declines": [
            {**asdict(each), "strengths": list(each.strengths), "top1": list(each.top1)} for each in found
        ],
    }

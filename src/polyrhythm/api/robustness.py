"""Accuracy of networks on increasingly distorted images, for the verb `evaluate --robustness`.

    kinds       augmentations at 1/4, 1/2, 1, 3/2, 2 of their default strength, every image changed
                corruptions at severity 1 to 5
    top-1       of the same images each time; step 0 is the original image

R. Wu and others, "Deep Image", 2015, arXiv:1501.02876, figure 9, for the question; Hendrycks and Dietterich, ICLR 2019,
for the corruptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Unpack, cast

import torch
from PIL import Image
from torch import Tensor, nn

from polyrhythm.augmentation.chain import TRANSFORMS, Chain, Transform
from polyrhythm.augmentation.tones import Tones
from polyrhythm.config.run_config import TrainedOptions
from polyrhythm.config.trained import Trained, load_trained, voters
from polyrhythm.data.dataset import Dataset, Split
from polyrhythm.data.seeding import generator_for, sample_keys
from polyrhythm.errors import RequestError, unknown
from polyrhythm.evaluation.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from polyrhythm.evaluation.ensemble import ProbabilityMean
from polyrhythm.evaluation.evaluate import in_evaluation_mode
from polyrhythm.reporting.pages.several_runs import write_robustness
from polyrhythm.specs import Config, choices, validated

FACTORS = (0.25, 0.5, 1.0, 1.5, 2.0)
_SHADES = 3
_BATCH = 250
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
        plot: an HTML file for curves, table and an image under every change; None: none is written.
        device: `cpu`, `cuda` or `auto`.
        **options: `data`, `model`, `image_size` and `skip_unreadable`, as for `evaluate`.

    Returns:
        `data`, `images`, `plot`, and `models`: for each `weights`, `model`, `clean_top1`, `declines` (`name`, `kind`,
        `strengths`, `top1`), and `corrupted_top1`, the mean over all corruptions and severities (None without any);
        `together`: the same of their mean probabilities, where several were trained on images of one size.

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
        model = ProbabilityMean([each.model for each in trained])
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
    """Return images (n, C, H, W) next to each other as a JPEG file of `_EXAMPLE_SIDE` pixels in height."""
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


Change = Callable[[Tensor, Tensor], Tensor]
"""Maps images (B, C, H, W) and their numbers (B,) to changed images."""


@dataclass(frozen=True)
class Decline:
    """Accuracy under one kind of change: top-1 by the augmentation's strengths, or the severities."""

    name: str
    kind: str
    strengths: tuple[float, ...]
    top1: tuple[float, ...]


def declines(
    model: nn.Module,
    dataset: Dataset,
    indices: Tensor,
    device: torch.device | str = "cpu",
    kinds: Sequence[str] = (),
) -> tuple[float, list[Decline]]:
    """Test a model on increasingly distorted images.

    Args:
        model: model on `device`.
        dataset: dataset with the test images.
        indices: (n,) int64, numbers of the test images.
        device: device of the model.
        kinds: names of augmentations and corruptions; empty: all of them.

    Returns:
        The accuracy on the original images, and the declines, augmentations first.

    Raises:
        RequestError: there is no such kind for these images.
    """
    chosen = _chosen(dataset, kinds)
    with in_evaluation_mode(model):

        def tested(change: Change | None) -> float:
            right = 0
            for part in indices.split(_BATCH):
                images = dataset.test.images(part)
                seen = images if change is None else change(images, part)
                likeliest = model(seen.to(device)).argmax(1).cpu()
                right += int((likeliest == dataset.test.labels[part]).sum())
            return right / len(indices)

        found = [
            Decline(name, kind, tuple(strengths), tuple(tested(change) for change in changes))
            for name, kind, strengths, changes in chosen
        ]
        return tested(None), found


def examples(dataset: Dataset, index: int, kinds: Sequence[str] = ()) -> dict[str, Tensor]:
    """Show what the kinds of change do to a test image.

    Args:
        dataset: dataset with the test image.
        index: number of the image.
        kinds: see `declines`.

    Returns:
        For every kind, (6, C, H, W): the image as it is, then changed ever more.
    """
    one = torch.tensor([index])
    image = dataset.test.images(one)
    return {
        name: torch.cat([image, *(change(image, one) for change in changes)])
        for name, _, _, changes in _chosen(dataset, kinds)
    }


_Kind = tuple[str, str, list[float], list[Change]]
"""Name, `augmentation` or `corruption`, strengths, and the change of each strength."""


def _chosen(dataset: Dataset, kinds: Sequence[str]) -> list[_Kind]:
    known = list(_kinds(dataset.image_shape[0], Tones(dataset.black, dataset.white)))
    for name in kinds:
        if name not in (names := [each[0] for each in known]):
            raise unknown("kind of change", name, names)
    return [each for each in known if not kinds or each[0] in kinds]


def _kinds(channels: int, tones: Tones) -> Iterator[_Kind]:
    for name, kind in choices(TRANSFORMS).items():
        if {"strength", "probability"} <= kind.model_fields.keys() and not (
            name == "color_casting" and channels < _SHADES
        ):
            steps = [_strengthened(kind, factor) for factor in FACTORS]
            strengths = [float(getattr(step, "strength")) for step in steps]  # noqa: B009
            yield name, "augmentation", strengths, [_augmented(step, tones) for step in steps]
    severities = range(1, SEVERITIES + 1)
    for name in CORRUPTIONS:
        changes = [_corrupted(name, severity, tones) for severity in severities]
        yield name, "corruption", [float(severity) for severity in severities], changes


def _strengthened(kind: type[Config], factor: float) -> Config:
    """Return an augmentation with a multiple of its default strength, within its limits, that changes every image."""
    info = kind.model_fields["strength"]
    strength: Any = info.default * factor
    for limit in info.metadata:
        strength = min(strength, getattr(limit, "le", strength))
        # An exclusive limit: stay just below it.
        if hasattr(limit, "lt"):
            strength = min(strength, 0.99 * limit.lt)
    values = {"strength": round(strength) if isinstance(info.default, int) else strength, "probability": 1.0}
    return validated(f"augmentation {kind.name}", kind, values)


def _augmented(transform: Config, tones: Tones) -> Change:
    chain = Chain((cast("Transform", transform),), tones)
    return lambda images, indices: chain(images, sample_keys("robustness", 0, 0, indices))


def _corrupted(name: str, severity: int, tones: Tones) -> Change:
    return lambda images, indices: corrupt(name, images, severity, indices, tones)

"""Accuracy of a network on increasingly distorted pictures, by kind and strength of the distortion.

    kinds       augmentations at 1/4, 1/2, 1, 3/2, 2 of their default strength, every picture changed
                corruptions at severity 1 to 5
    top-1       of the same pictures each time; step 0 is the original picture

R. Wu and others, "Deep Image", 2015, arXiv:1501.02876, figure 9, for the question; Hendrycks and Dietterich, ICLR 2019,
for the corruptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from polyrhythm.augmentation.chain import TRANSFORMS, Chain, Transform
from polyrhythm.augmentation.tones import Tones
from polyrhythm.data.seeding import sample_keys
from polyrhythm.errors import unknown
from polyrhythm.evaluation.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from polyrhythm.evaluation.evaluate import in_evaluation_mode
from polyrhythm.specs import Config, choices, validated

if TYPE_CHECKING:
    from polyrhythm.data.dataset import Dataset

FACTORS = (0.25, 0.5, 1.0, 1.5, 2.0)
_SHADES = 3
_BATCH = 250

Change = Callable[[Tensor, Tensor], Tensor]
"""Maps pictures (B, C, H, W) and their numbers (B,) to changed pictures."""


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
    """Test a model on increasingly distorted pictures.

    Args:
        model: on `device`.
        dataset: its test pictures are used.
        indices: (n,) int64, which of them.
        device: where the model is.
        kinds: names of augmentations and corruptions; empty: all of them.

    Returns:
        The accuracy on the original pictures, and the declines, augmentations first.

    Raises:
        RequestError: there is no such kind for these pictures.
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
    """Show what the kinds of change do to a test picture.

    Args:
        dataset: whose test picture it is.
        index: its number.
        kinds: as for `declines`.

    Returns:
        For every kind, (6, C, H, W): the picture as it is, then changed ever more.
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
            name == "colour_casting" and channels < _SHADES
        ):
            steps = [_strengthened(kind, factor) for factor in FACTORS]
            strengths = [float(getattr(step, "strength")) for step in steps]  # noqa: B009
            yield name, "augmentation", strengths, [_augmented(step, tones) for step in steps]
    severities = range(1, SEVERITIES + 1)
    for name in CORRUPTIONS:
        changes = [_corrupted(name, severity, tones) for severity in severities]
        yield name, "corruption", [float(severity) for severity in severities], changes


def _strengthened(kind: type[Config], factor: float) -> Config:
    """Return an augmentation with a multiple of its default strength, within its limits, that changes every picture."""
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

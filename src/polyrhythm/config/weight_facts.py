"""Options of a run that a file of its weights determines."""

from __future__ import annotations

from math import isclose
from pathlib import Path
from typing import Any

from polyrhythm.data.images import CENTRAL_SHARE, NORMALIZATIONS
from polyrhythm.models.weights import read_metadata


def weight_facts(file: Path) -> dict[str, Any]:
    """Return the metadata of a file of weights, with the `image_size`, `scale` and `pixels` that they imply.

    Empty for a file that is not safetensors.
    """
    if file.suffix != ".safetensors":
        return {}
    facts: dict[str, Any] = dict(read_metadata(file))
    try:
        _, height, width = (int(number) for number in facts["image_shape"].split(","))
        shown = float(facts.get("shown", CENTRAL_SHARE))
        tones = [tuple(float(number) for number in facts[tone].split(",")) for tone in ("black", "white")]
    except (KeyError, ValueError):  # weights of others
        return facts
    if height == width:
        facts["image_size"] = width
        if not isclose(shown, CENTRAL_SHARE):
            facts["scale"] = round(width / shown)
    for name, normalization in NORMALIZATIONS.items():
        expected = [normalization.of_tone(tone) for tone in (0, 255)]
        if all(
            len(own) == len(other) and all(map(_alike, own, other))
            for own, other in zip(tones, expected, strict=True)
        ):
            facts["pixels"] = name
    return facts


def _alike(one: float, other: float) -> bool:
    return isclose(one, other, rel_tol=1e-3, abs_tol=1e-3)

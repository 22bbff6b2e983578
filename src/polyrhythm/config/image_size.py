"""Image size of files where none is given: small images are not scaled up."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from polyrhythm.config.model import shapes_of
from polyrhythm.config.run_config import RunConfig
from polyrhythm.config.trained import facts_of
from polyrhythm.data.image_files import ImageSource
from polyrhythm.data.images import CENTRAL_SHARE, CENTRE, stored_size
from polyrhythm.data.open import source_of
from polyrhythm.models.create import takes

_MULTIPLE = 4


def with_image_size(config: RunConfig) -> RunConfig:
    """Return the configuration with the image size of its files, where neither it nor its data determines one.

    The center that is shown of a file keeps its pixels, by the median of a sample, up to 224. A network that does not
    support images so small gets a multiple of that size. Trained weights keep the size of their run, or 224.

    Raises:
        RequestError: the data cannot be listed.
    """
    source = source_of(config.data)
    if (
        "image_size" in config.model_fields_set
        or config.scale is not None
        or not isinstance(source, ImageSource)
        or source.model_fields_set & {"image_size", "shown"}
    ):
        return config
    if config.weights is None:
        size = _supported(config.model, _of_files(source.encoded()))
    else:
        size = _of_run(Path(config.weights))
    return config.model_copy(update={"image_size": size})


def _of_files(files: Iterable[str | IO[bytes]]) -> int:
    """Return the pixels a side of the center that is shown, a multiple of four; 224 if no file can be read."""
    sides = sorted(min(size) for size in map(stored_size, files) if size is not None)
    if not sides:
        return CENTRE
    shown = CENTRAL_SHARE * sides[len(sides) // 2]
    return max(1, round(shown / _MULTIPLE)) * _MULTIPLE


def _supported(model: Any, size: int) -> int:
    """Return the least multiple of a size, below 224, that a network supports; 224 if there is none."""
    return next((side for side in range(size, CENTRE, size) if _takes(model, (3, side, side))), CENTRE)


def _takes(model: Any, image_shape: tuple[int, int, int]) -> bool:
    try:
        return takes(shapes_of(model, 2, image_shape), image_shape)
    except Exception:  # a network can fail in any way; at its usual size it is refused with a reason
        return False


def _of_run(weights: Path) -> int:
    size = facts_of(weights).get("image_size") if weights.exists() else None
    return size if isinstance(size, int) else CENTRE

"""Export of networks to files that need neither this project nor their Python code; the suffix is the format."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

from polyrhythm.errors import RequestError, RunError
from polyrhythm.specs import choices

if TYPE_CHECKING:
    from polyrhythm.specs import Config

FORMATS = "polyrhythm.models.export_formats"
FACTS_FILE = "polyrhythm.json"
"""File of the export's facts: classes and size of the images."""

_TOLERANCE = 1e-4


class ExportFormat(Protocol):
    """Interface of the `Config` in every module of the folder `export_formats`.

    Attributes:
        suffix: suffix of its files, with the dot.
    """

    suffix: str

    def write(self, network: nn.Module, images: Tensor, path: Path, facts: str, any_size: bool) -> None:
        """Write a network that takes any number of images like `pictures`, with the text `facts` as an extra file.

        With `any_size`, images of another height and width as well.
        """

    def run(self, path: Path, images: Tensor) -> Tensor:
        """Return the output of the network in a file for images."""
        ...


@dataclass(frozen=True)
class Exported:
    """A written file's format, and how far its outputs are from the network's, at most, on random images."""

    format: str
    largest_difference: float


def export(
    network: nn.Module,
    image_shape: tuple[int, int, int],
    path: Path,
    facts: dict[str, object],
    *,
    any_size: bool = False,
) -> Exported:
    """Write a network to a file, open it again, and compare outputs; a wrong file is removed.

    Args:
        network: network that accepts (B, C, H, W) uint8 of any B, on the CPU, in evaluation mode.
        image_shape: (C, H, W).
        path: path of the file; its suffix is the format.
        facts: stored in the file, as JSON.
        any_size: whether the network takes larger H and W as well, and the file shall.

    Raises:
        RequestError: no such format, or a required package is missing.
        RunError: the network cannot be written in this format, or its outputs changed.
    """
    known = {cast("ExportFormat", kind()).suffix: kind for kind in choices(FORMATS).values()}
    kind = known.get(path.suffix)
    if kind is None:
        formats = ", ".join(f"{suffix} ({kind.name})" for suffix, kind in sorted(known.items()))
        raise RequestError(f"{path} names no format by its ending: give it one of {formats}")
    chosen: Config = kind()
    generator = torch.Generator().manual_seed(0)
    channels, height, width = image_shape
    # A network traced at one size must work at another.
    sizes = [(height, width), (height + 9, width + 17)] if any_size else [(height, width)]
    batches = [
        torch.randint(256, (3, channels, *size), dtype=torch.uint8, generator=generator) for size in sizes
    ]
    writer = cast("ExportFormat", chosen)
    try:
        with torch.no_grad():
            writer.write(network, batches[-1][:2], path, json.dumps(facts), any_size)
            differences = [
                float((network(images) - writer.run(path, images)).abs().max()) for images in batches
            ]
            difference = max(differences, key=lambda each: float("inf") if math.isnan(each) else each)
    except RequestError:
        raise
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise RunError(f"cannot write {path}: {error.strerror or error}") from None
    except Exception as error:  # tracing can fail in any way
        path.unlink(missing_ok=True)
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise RunError(f"the network cannot be written as {chosen.name}: {reason}") from error
    if not difference <= _TOLERANCE:
        path.unlink()
        raise RunError(
            f"written as {chosen.name} the network gives other outputs (by {difference:.2g}): not kept"
        )
    return Exported(chosen.name, difference)

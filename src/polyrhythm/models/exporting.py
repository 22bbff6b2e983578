"""Networks as files that need neither this project nor their Python code; the ending of the file is the format."""

from __future__ import annotations

import json
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
"""What the exported file holds besides the network: its classes and the size of its pictures."""

_TOLERANCE = 1e-4


class ExportFormat(Protocol):
    """What every module's `Config` in the folder `export_formats` can do.

    Attributes:
        suffix: of its files, with the dot.
    """

    suffix: str

    def write(self, network: nn.Module, pictures: Tensor, path: Path, facts: str) -> None:
        """Writes a network, which takes `pictures` and any number of such, with a text beside it."""

    def run(self, path: Path, pictures: Tensor) -> Tensor:
        """Gives what the file makes of pictures."""
        ...


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        format: by name.
        largest_difference: between the file's outputs and the network's, on random pictures.
    """

    format: str
    largest_difference: float


def export(
    network: nn.Module, image_shape: tuple[int, int, int], path: Path, facts: dict[str, object]
) -> Exported:
    """Writes a network into a file, opens the file again, and compares outputs; a wrong file is removed.

    Args:
        network: takes (B, C, H, W) uint8 of any B, on the CPU, in evaluation mode.
        image_shape: (C, H, W).
        path: its ending is the format.
        facts: kept in the file, as JSON.

    Raises:
        RequestError: no such format, or a package that it takes is missing.
        RunError: the network cannot be written in this format, or came out different.
    """
    known = {cast("ExportFormat", kind()).suffix: kind for kind in choices(FORMATS).values()}
    kind = known.get(path.suffix)
    if kind is None:
        formats = ", ".join(f"{suffix} ({kind.name})" for suffix, kind in sorted(known.items()))
        raise RequestError(f"{path} names no format by its ending: give it one of {formats}")
    chosen: Config = kind()
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(256, (3, *image_shape), dtype=torch.uint8, generator=generator)
    writer = cast("ExportFormat", chosen)
    try:
        with torch.no_grad():
            writer.write(network, pictures[:2], path, json.dumps(facts))
            difference = float((network(pictures) - writer.run(path, pictures)).abs().max())
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

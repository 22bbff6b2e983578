"""ExportedProgram: PyTorch's own format of whole graphs; `torch.export.load` opens it."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, ClassVar

import torch

from polyrhythm.errors import RequestError
from polyrhythm.models.exporting import FACTS_FILE
from polyrhythm.specs import Config

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn


class ExportedProgram(Config):
    """The network's graph, for any number of images."""

    suffix: ClassVar[str] = ".pt2"

    def write(self, network: nn.Module, images: Tensor, path: Path, facts: str, any_size: bool) -> None:
        """Write the file; see `ExportFormat.write`.

        Raises:
            RequestError: images of any size are asked for: a graph of this format holds either for maps of one place
                or for larger ones.
        """
        if any_size:
            raise RequestError("exported_program supports images of one size: name an .onnx or a .pt file")
        program = torch.export.export(network, (images,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        # By way of memory: on a full disk torch's own writer ends the process.
        written = io.BytesIO()
        torch.export.save(program, written, extra_files={FACTS_FILE: facts})
        path.write_bytes(written.getvalue())

    def run(self, path: Path, images: Tensor) -> Tensor:
        """Open the file and run it; see `ExportFormat.run`."""
        found: Tensor = torch.export.load(str(path)).module()(images)
        return found

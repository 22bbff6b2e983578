"""TorchScript: `torch.jit.load` opens it, in Python and in C++ (libtorch)."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, ClassVar

import torch

from polyrhythm.models.exporting import FACTS_FILE
from polyrhythm.specs import Config

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn


class TorchScript(Config):
    """The traced operations of a network."""

    suffix: ClassVar[str] = ".pt"

    def write(self, network: nn.Module, images: Tensor, path: Path, facts: str, any_size: bool) -> None:
        """Write the file; see `ExportFormat.write`."""
        # that it is an old format, and that tracing may go wrong: the outputs are compared
        with warnings.catch_warnings(action="ignore"):
            traced = torch.jit.trace(network, images)
            written = io.BytesIO()  # on a full disk torch's own writer ends the process
            torch.jit.save(traced, written, _extra_files={FACTS_FILE: facts})
        path.write_bytes(written.getvalue())

    def run(self, path: Path, images: Tensor) -> Tensor:
        """Open the file and run it; see `ExportFormat.run`."""
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            found: Tensor = torch.jit.load(str(path))(images)
        return found

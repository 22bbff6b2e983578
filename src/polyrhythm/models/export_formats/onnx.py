"""ONNX, which most other programs read; writing it needs the packages onnx and onnxscript."""

from __future__ import annotations

import importlib.util
import warnings
from typing import TYPE_CHECKING, ClassVar

import torch

from polyrhythm.errors import RequestError
from polyrhythm.models.exporting import FACTS_FILE
from polyrhythm.specs import Config

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

_NEEDED = ("onnx", "onnxscript")


class ONNX(Config):
    """The network's graph, for batches of any size."""

    suffix: ClassVar[str] = ".onnx"

    def write(self, network: nn.Module, pictures: Tensor, path: Path, facts: str) -> None:
        """Write the file; see `ExportFormat.write`.

        Raises:
            RequestError: a required package is missing.
        """
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise RequestError(
                f"writing ONNX takes {' and '.join(missing)}: install what is missing, or name a .pt or .pt2 file"
            )
        with warnings.catch_warnings(action="ignore"):  # the exporter's, about itself
            program = torch.onnx.export(
                network,
                (pictures,),
                input_names=["pictures"],
                output_names=["probabilities"],
                dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
        assert program is not None
        program.model.metadata_props[FACTS_FILE] = facts
        program.save(str(path))

    def run(self, path: Path, pictures: Tensor) -> Tensor:
        """Run the file with onnx's reference evaluator; see `ExportFormat.run`."""
        from onnx.reference import ReferenceEvaluator

        (found,) = ReferenceEvaluator(str(path)).run(None, {"pictures": pictures.numpy()})
        return torch.from_numpy(found)

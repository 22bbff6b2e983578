"""ONNX, which most other programs read; writing it needs the packages onnx and onnxscript (the extra `onnx`)."""

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
    """The network's graph, for any number of images."""

    suffix: ClassVar[str] = ".onnx"

    def write(self, network: nn.Module, images: Tensor, path: Path, facts: str, any_size: bool) -> None:
        """Write the file; see `ExportFormat.write`.

        Raises:
            RequestError: a required package is missing.
        """
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise RequestError(
                f"writing ONNX takes {' and '.join(missing)}: pip install 'polyrhythm[onnx]', or name a .pt or "
                ".pt2 file"
            )
        with warnings.catch_warnings(action="ignore"):  # the exporter's, about itself
            program = torch.onnx.export(
                network,
                (images,),
                input_names=["pictures"],
                output_names=["probabilities"],
                dynamic_shapes=(dict.fromkeys((0, 2, 3) if any_size else (0,), torch.export.Dim.DYNAMIC),),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
        assert program is not None
        program.model.metadata_props[FACTS_FILE] = facts
        program.save(str(path))

    def run(self, path: Path, images: Tensor) -> Tensor:
        """Run the file with onnxruntime, or where there is none with onnx's reference; see `ExportFormat.run`."""
        given = {"pictures": images.numpy()}
        if importlib.util.find_spec("onnxruntime") is not None:
            from onnxruntime import InferenceSession

            (found,) = InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, given)
        else:
            from onnx.reference import ReferenceEvaluator

            (found,) = ReferenceEvaluator(str(path)).run(None, given)
        return torch.from_numpy(found)

"""A trained network as a file for other programs, for the verb `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

from polyrhythm.api.served import load_served
from polyrhythm.config.run_config import NetworkOptions
from polyrhythm.errors import RequestError
from polyrhythm.models.exporting import export as export_network
from polyrhythm.user_files import check_output


def export(weights: str | Path, out: str | Path, **options: Unpack[NetworkOptions]) -> dict[str, Any]:
    """Write a network with its preprocessing: bytes (B, C, H, W) in, class probabilities (B, classes) out.

    Args:
        weights: a run folder or a file of weights.
        out: the file; its suffix is the format: .pt (TorchScript), .pt2 (ExportedProgram), .onnx.
        **options: `data` and `model`, if the weights do not record them.

    Returns: `file`, `format`, `model`, `classes`, `image_shape`, `temperature` (as `evaluate` with `calibrate` has
        found it, else 1), and `largest_difference` between the outputs of the file and of the network for random
        pictures.

    Raises:
        RequestError: the request is invalid.
        RunError: the network cannot be written in that format.
    """
    path = Path(out)
    if path.exists() or not path.parent.is_dir():
        what = "is there already" if path.exists() else "lies in no folder"
        raise RequestError(f"{path} {what}: name a new file with --out")
    check_output(path)
    served = load_served(weights, device="cpu", **options)
    shape = served.preprocessing.image_shape
    facts = {
        "classes": list(served.classes),
        "image_shape": list(shape),
        "model": served.model_name,
        "temperature": served.network.temperature,
    }
    written = export_network(served.network, shape, path, dict(facts))
    return {
        "file": str(path),
        "format": written.format,
        **facts,
        "largest_difference": written.largest_difference,
    }

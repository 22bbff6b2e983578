"""A trained network as a file for other programs, as the verb `export` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

from polyrhythm.api.served import load_served
from polyrhythm.config.run_config import NetworkOptions
from polyrhythm.errors import RequestError
from polyrhythm.models.exporting import export as export_network


def export(weights: str | Path, out: str | Path, **options: Unpack[NetworkOptions]) -> dict[str, Any]:
    """Writes a network with its preprocessing: bytes (B, C, H, W) in, class probabilities (B, classes) out.

    Args:
        weights: a run folder or a file of weights.
        out: the file; its ending says the format: .pt (TorchScript), .pt2 (ExportedProgram), .onnx.
        **options: `data` and `model`, where the weights do not say them.

    Returns:
        `file`, `format`, `model`, `classes`, `image_shape`, and `largest_difference` between what the file and the
        network make of random pictures.

    Raises:
        RequestError: something in the request is wrong.
        RunError: the network cannot be written in that format.
    """
    path = Path(out)
    if path.exists() or not path.parent.is_dir():
        what = "is there already" if path.exists() else "lies in no folder"
        raise RequestError(f"{path} {what}: name a new file with --out")
    served = load_served(weights, device="cpu", **options)
    shape = served.preprocessing.image_shape
    facts = {"classes": list(served.classes), "image_shape": list(shape), "model": served.model_name}
    written = export_network(served.network, shape, path, dict(facts))
    return {
        "file": str(path),
        "format": written.format,
        **facts,
        "largest_difference": written.largest_difference,
    }

"""A trained network as a file for other programs, for the verb `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

import torch

from polyrhythm.api.served import Normalized, Served, load_served
from polyrhythm.config.run_config import NetworkOptions
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.dense import NotConvertible, to_dense
from polyrhythm.evaluation.views import Views
from polyrhythm.models.exporting import export as export_network
from polyrhythm.user_files import check_new_file


def export(
    weights: str | Path,
    out: str | Path,
    *,
    dense: bool = False,
    any_size: bool = False,
    **options: Unpack[NetworkOptions],
) -> dict[str, Any]:
    """Write a network with its preprocessing: bytes (B, C, H, W) in, class probabilities (B, classes) out.

    Args:
        weights: a run folder or a file of weights.
        out: the file; its suffix is the format: .pt (TorchScript), .pt2 (ExportedProgram), .onnx.
        dense: apply the network at every place of images of training size and larger, as `evaluate` does.
        any_size: accept images of any size; for networks that end in a global pooling.
        **options: `data` and `model`, if the weights do not record them.

    Returns:
        `file`, `format`, `model`, `classes`, `image_shape`, `dense`, `any_size`, `temperature` (as `evaluate` with
        `calibrate` has found it, else 1), and `largest_difference` between the outputs of the file and of the network
        for random images.

    Raises:
        RequestError: the request is invalid.
        RunError: the network cannot be written in that format.
    """
    path = Path(out)
    check_new_file(path)
    served = load_served(weights, device="cpu", **options)
    shape = served.preprocessing.image_shape
    network = served.network
    if dense:
        network = _dense(served)
    elif any_size:
        _check_any_size(network, shape)
    facts = {
        "classes": list(served.classes),
        "image_shape": list(shape),
        "model": served.model_name,
        "temperature": network.temperature,
        "dense": dense,
        "any_size": dense or any_size,
    }
    written = export_network(network, shape, path, dict(facts), any_size=dense or any_size)
    return {
        "file": str(path),
        "format": written.format,
        **facts,
        "largest_difference": written.largest_difference,
    }


def _dense(served: Served) -> Normalized:
    """Return the network applied at every place, with the temperature of such views."""
    preprocessing = served.preprocessing
    try:
        dense = to_dense(served.network.model, preprocessing.image_shape)
    except NotConvertible as error:
        raise RequestError(
            f"{served.model_name} cannot be exported densely ({error}): leave --dense out"
        ) from None
    return Normalized(dense, preprocessing, served.temperature(Views(dense=True))).eval()


def _check_any_size(network: Normalized, shape: tuple[int, int, int]) -> None:
    channels, height, width = shape
    try:
        with torch.no_grad():
            network(torch.zeros(1, channels, height + 9, width + 17, dtype=torch.uint8))
    except RuntimeError:
        raise RequestError(
            f"the network accepts images of {height} by {width} only: leave --any-size out, or give --dense"
        ) from None

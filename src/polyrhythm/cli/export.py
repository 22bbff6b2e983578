"""`polyrhythm export`."""

from __future__ import annotations

from typing import Annotated

import typer

from polyrhythm.cli.options import Json, Network
from polyrhythm.cli.output import print_json


def export(
    weights: Annotated[
        str, typer.Argument(metavar="RUN_OR_WEIGHTS", help="A run folder or a file of weights.")
    ],
    out: Annotated[
        str, typer.Option(help="The file: .pt (TorchScript), .pt2 (ExportedProgram) or .onnx.")
    ] = "model.pt2",
    dense: Annotated[
        bool,
        typer.Option("--dense", help="Apply the network at every position of images of any larger size."),
    ] = False,
    any_size: Annotated[
        bool, typer.Option("--any-size", help="Accept images of other sizes unscaled (global pooling).")
    ] = False,
    data: Annotated[str | None, typer.Option(help="Training data (default: as recorded).")] = None,
    model: Network = None,
    json: Json = False,
) -> None:
    """Export a trained network to TorchScript, ExportedProgram or ONNX."""
    from polyrhythm.api.export import export as export_weights

    found = export_weights(weights, out, dense=dense, any_size=any_size, data=data, model=model)
    if json:
        print_json(found)
        return
    channels, height, width = found["image_shape"]
    print(f"{found['file']}: {found['model']} as {found['format']}, {len(found['classes'])} classes")
    size = f"H, W), from {height} by {width} pixels on" if found["any_size"] else f"{height}, {width})"
    print(f"takes bytes (B, {channels}, {size}; checked to {found['largest_difference']:.1g}")

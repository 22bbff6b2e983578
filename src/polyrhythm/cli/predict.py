"""`polyrhythm predict`, also with `--serve`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from polyrhythm.cli.options import Dense, Device, Flip, Json, Network, Scales, TenCrop, numbers
from polyrhythm.cli.output import print_json, print_table
from polyrhythm.errors import RequestError
from polyrhythm.reporting.quantities import percent

_PORT = 8000


def predict(
    weights: Annotated[
        list[str],
        typer.Option(help="A run folder or a file of weights; several: each one's result and their mean."),
    ],
    images: Annotated[
        list[str] | None, typer.Argument(metavar="IMAGE", help="Image files, or folders of them.")
    ] = None,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="Number of classes per image.")] = 5,
    data: Annotated[str | None, typer.Option(help="Training data (default: as recorded).")] = None,
    model: Network = None,
    device: Device = "auto",
    dense: Dense = False,
    ten_crop: TenCrop = False,
    flip: Flip = False,
    scales: Scales = None,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="T", help="Temperature of the softmax (default: that of evaluate --calibrate)."),
    ] = None,
    none_below: Annotated[
        float,
        typer.Option(metavar="P", help="Probability below which an image counts as none of the classes."),
    ] = 0.0,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Skip images that cannot be read.")
    ] = False,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A table or JSON to write, by its ending: .csv or .json."),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve a page for dropping images, on this machine only.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, max=65535, help="TCP port of --serve (default: 8000; 0: a free port)."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Classify images: the likeliest classes with their probabilities."""
    given: dict[str, Any] = {"data": data, "model": model, "dense": dense, "ten_crop": ten_crop, "flip": flip}
    given["scales"] = numbers("--scales", scales, int, "224,256")
    options: Any = {name: value for name, value in given.items() if value}
    if serve:
        beside = {"IMAGE": images, "--out": out, "--json": json, "--skip-unreadable": skip_unreadable}
        for name, value in beside.items():
            if value:
                raise RequestError(f"{name} is not for --serve, which receives images: leave it out")
        _serve(weights, device, temperature, none_below, options, top, _PORT if port is None else port)
        return
    if port is not None:
        raise RequestError("--port needs --serve")
    from polyrhythm.api.predict import predict as predict_images

    found = predict_images(
        images or [],
        weights,
        top=top,
        device=device,
        temperature=temperature,
        none_below=none_below,
        skip_unreadable=skip_unreadable,
        out=out,
        progress=_print_progress if sys.stderr.isatty() else lambda done, all_: None,
        **options,
    )
    if json:
        print_json(found)
        return
    for each in found["unreadable"]:
        print(f"left out: {each['image']} cannot be read ({each['reason']})", file=sys.stderr)
    if out is not None:
        print(f"{len(found['images']):,} images: {out}")
        return
    for entry in found["images"]:
        _print_result(entry, found["weights"])


def _serve(
    weights: list[str],
    device: str,
    temperature: float | None,
    none_below: float,
    options: Any,
    top: int,
    port: int,
) -> None:
    from polyrhythm.api.predict import Networks
    from polyrhythm.api.predict_page import serve

    networks = Networks.load(weights, device, temperature, none_below, options)
    serve(networks, top, port, lambda address: print(f"{address} (Ctrl-C ends it)", flush=True))


def _print_progress(done: int, every: int) -> None:
    end = "\n" if done == every else ""
    print(f"\r{done:,} of {every:,} images", end=end, file=sys.stderr, flush=True)


def _print_result(entry: dict[str, Any], weights: list[str]) -> None:
    lists = entry["networks"] if len(weights) == 1 else [entry["classes"], *entry["networks"]]
    heads = ["class and probability"] if len(weights) == 1 else ["mean", *weights]
    rows = [
        [str(place), *(f"{each['class']}  {percent(each['probability'])}" for each in row)]
        for place, row in enumerate(zip(*lists, strict=True), start=1)
    ]
    print_table(entry["image"] + (": none of these" if entry["none_of_these"] else ""), ["", *heads], rows)

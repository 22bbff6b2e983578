"""`polyrhythm predict`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from polyrhythm.cli.output import JSON_HELP, percent, print_json, print_table


def predict(
    images: Annotated[list[str], typer.Argument(metavar="IMAGE", help="Picture files, or folders of them.")],
    weights: Annotated[
        list[str],
        typer.Option(help="A run folder or a file of weights; several stand side by side, and vote."),
    ],
    top: Annotated[int, typer.Option(metavar="N", min=1, help="How many classes of each picture.")] = 5,
    data: Annotated[str | None, typer.Option(help="What it was trained on (default: as it says).")] = None,
    model: Annotated[str | None, typer.Option(help="The network (default: the run's).")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Name what pictures show: the likeliest classes, with their probabilities."""
    from polyrhythm.api.predict import predict as predict_images

    found = predict_images(images, weights, top=top, data=data, model=model, device=device)
    if json:
        print_json(found)
        return
    for entry in found["images"]:
        _say(entry, found["weights"])


def _say(entry: dict[str, Any], weights: list[str]) -> None:
    lists = entry["networks"] if len(weights) == 1 else [entry["classes"], *entry["networks"]]
    heads = ["class and probability"] if len(weights) == 1 else ["together", *weights]
    rows = [
        [str(place), *(f"{each['class']}  {percent(each['probability'])}" for each in row)]
        for place, row in enumerate(zip(*lists, strict=True), start=1)
    ]
    print_table(entry["image"], ["", *heads], rows)
